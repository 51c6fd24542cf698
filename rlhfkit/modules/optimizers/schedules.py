"""Learning rates by optimizer step: warm-up, then a shape, then a minimum."""

import math
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
ENDLESS: tuple[str, ...] = ("constant", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""


def learning_rate_factor(
    step: int,
    *,
    schedule: str,
    warmup_steps: int,
    total_steps: int | None,
    minimum: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Factor in [0, 1] of the peak learning rate after ``step`` optimizer steps.

    It rises linearly from 0 to 1 during warm-up. Then, with ``x`` from 0 to 1 through the rest of the run, it is

    - ``constant``: 1;
    - ``linear``: ``1 - x``;
    - ``cosine``: ``(1 + cos πx) / 2`` (Loshchilov and Hutter, 2017, arXiv:1608.03983, without restarts);
    - ``inverse_sqrt``: ``1 / sqrt(step / warmup_steps)`` (Vaswani et al., 2017, arXiv:1706.03762);
    - ``wsd`` (warm-up, stable, decay: Hu et al., 2024, arXiv:2404.06395): 1 until the last ``decay_steps``, in which it
      is ``1 - sqrt(x)`` of them (Hägele et al., 2024, arXiv:2405.18392).

    A factor ``f`` after warm-up becomes ``minimum + (1 - minimum) f``.

    Args:
        step: Optimizer steps so far.
        schedule: Shape, see above.
        warmup_steps: Optimizer steps of warm-up; ``inverse_sqrt`` takes 10,000 for 0, as in Transformers.
        total_steps: Optimizer steps of the run; ``None`` for schedules that do not depend on it.
        minimum: Factor at the end, in [0, 1].
        decay_steps: Optimizer steps of ``wsd``'s decay.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "inverse_sqrt":
        timescale = warmup_steps or 10_000
        factor = 1.0 / math.sqrt((step + timescale - warmup_steps) / timescale)
    elif schedule == "constant" or total_steps is None:
        factor = 1.0
    elif schedule == "wsd":
        length = max(decay_steps or 1, 1)
        factor = 1.0 - math.sqrt(min(max(step - (total_steps - length), 0) / length, 1.0))
    else:
        done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        factor = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return minimum + (1.0 - minimum) * factor if minimum else factor
