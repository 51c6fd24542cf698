"""Learning-rate schedules: warm-up, then constant, linear or cosine."""

import math
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int | None) -> float:
    """Factor of the peak learning rate at a step, the same as in Transformers' schedules of these names.

    It rises linearly from 0 to 1 during warm-up. Then it stays 1 (``constant``), or falls to 0 at the end of the run
    along a line (``linear``) or half a cosine (``cosine``: Loshchilov and Hutter, 2017, arXiv:1608.03983, without
    restarts).

    Args:
        step: Optimizer steps taken so far.
        schedule: ``constant``, ``linear`` or ``cosine``.
        warmup_steps: Optimizer steps of warm-up.
        total_steps: Optimizer steps of the run; not needed for ``constant``.

    Returns:
        In [0, 1].
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
