"""The optimizer's learning rate over a run, and gradient clipping."""

import math
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch.optim import Optimizer

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


def clip_each_child(module: LightningModule, optimizer: Optimizer, value: float | None, algorithm: Any) -> None:
    """Clip the gradient of each child of a module by its own norm, and log the norms as ``grad_norm/<child>``.

    An actor's update then does not shrink because its critic's gradient is large. DeepSpeed's engines, which do this
    and log the norms by themselves, are left to it.

    Args:
        module: Attached to a Trainer; its children own the parameters of the optimizer.
        optimizer: Optimizer of all children, or of some.
        value: Largest norm of each child; ``None`` or 0: nothing is clipped or logged.
        algorithm: The Trainer's ``gradient_clip_algorithm``; ``value`` clips each number alone anyway.
    """
    if not value or isinstance(module.trainer.precision_plugin, DeepSpeedPrecision):
        module.clip_gradients(optimizer, value, algorithm)
        return
    owners = {id(parameter): name for name, child in module.named_children() for parameter in child.parameters()}
    by_child: dict[str, list[torch.nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            by_child.setdefault(owners.get(id(parameter), "module"), []).append(parameter)
    for name, parameters in by_child.items():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        module.log(f"grad_norm/{name}", torch.nn.utils.get_total_norm(gradients))
        # The precision plugin reads the parameters from the optimizer, and whether it unscales gradients itself.
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        part = SimpleNamespace(param_groups=[{"params": parameters}], _step_supports_amp_scaling=unscales)
        module.clip_gradients(cast(Optimizer, part), value, algorithm)
