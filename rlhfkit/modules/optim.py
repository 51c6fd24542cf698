"""Learning-rate schedules: warm-up, then constant, linear or cosine."""

import math
from typing import Literal, get_args

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int | None) -> float:
    """Factor in [0, 1] of the peak learning rate after ``step`` optimizer steps, as in Transformers' schedules.

    It rises linearly from 0 to 1 during warm-up, then stays 1 (``constant``; ``total_steps`` may be ``None``), or falls
    to 0 at the end of the run along a line (``linear``) or half a cosine (``cosine``: Loshchilov and Hutter, 2017,
    arXiv:1608.03983, without restarts).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
