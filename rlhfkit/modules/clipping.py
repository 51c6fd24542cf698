"""One rule for clipping several models: each by the norm of its own gradient, under every strategy."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch.optim import Optimizer


def clip_each_child(module: LightningModule, optimizer: Optimizer, value: float | None, algorithm: Any) -> None:
    """Clip the gradient of each child of a module by its own norm, and log the norms as ``grad_norm/<child>``.

    So do DeepSpeed's engines, and implementations with an optimizer for each model: an actor's update does not shrink
    because its critic's gradient is large.

    Args:
        module: Attached to a Trainer; its children own what the optimizer trains.
        optimizer: Of all children, or some.
        value: Largest norm, of each child; ``None`` or 0: no clipping, and nothing is logged.
        algorithm: The Trainer's ``gradient_clip_algorithm``; of values, each is clipped alone anyway.
    """
    plugin = module.trainer.precision_plugin
    if not value or isinstance(plugin, DeepSpeedPrecision):  # whose engines clip and log each by itself
        module.clip_gradients(optimizer, value, algorithm)
        return
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owners = {id(parameter): name for name, child in module.named_children() for parameter in child.parameters()}
    by_child: dict[str, list[torch.nn.Parameter]] = {}
    for parameter in trained:
        by_child.setdefault(owners.get(id(parameter), "module"), []).append(parameter)
    for name, parameters in by_child.items():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        module.log(f"grad_norm/{name}", torch.nn.utils.get_total_norm(gradients))
        # The plugin reads the parameters off the optimizer, and whether it unscales gradients itself.
        unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
        part = SimpleNamespace(param_groups=[{"params": parameters}], _step_supports_amp_scaling=unscales)
        module.clip_gradients(cast(Optimizer, part), value, algorithm)
