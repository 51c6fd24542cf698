"""What becomes of a sample whose scoring failed: a function that hung, a server that was down."""

import math
from typing import Literal

OnFailure = Literal["mask", "stop"] | float
"""``"mask"``: the sample is not trained on; ``"stop"``: an error ends the run; a number: the reward of such samples."""


class RewardFailure(RuntimeError):
    """Scoring failed where it was to stop the run then."""


def checked_on_failure(on_failure: OnFailure) -> OnFailure:
    """The policy, if it is one.

    Args:
        on_failure: See :data:`OnFailure`.

    Raises:
        ValueError: If it is another word, or a number that is not finite.
    """
    if isinstance(on_failure, int | float) and not isinstance(on_failure, bool) and math.isfinite(on_failure):
        return float(on_failure)
    if on_failure in ("mask", "stop"):
        return on_failure
    raise ValueError(
        "on_failure must be 'mask' (the sample is not trained on), 'stop' (an error ends the run) or a finite number "
        f"(the reward of such samples), got {on_failure!r}"
    )


def reward_after_failure(on_failure: OnFailure, message: str) -> float | None:
    """The reward of a sample whose scoring failed.

    Args:
        on_failure: What is to happen.
        message: What failed, for the error.

    Returns:
        ``None`` for ``"mask"``, else the number.

    Raises:
        RewardFailure: For ``"stop"``.
    """
    if on_failure == "stop":
        raise RewardFailure(message)
    return None if on_failure == "mask" else float(on_failure)
