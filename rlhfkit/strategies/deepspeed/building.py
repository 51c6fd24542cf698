"""From the children of a LightningModule to engines: one per trained child, sharded or plain placement for the rest."""

import argparse
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from rlhfkit.strategies.deepspeed.engines import tag_outputs
from rlhfkit.strategies.deepspeed.gradients import clip_next_step, undo_initial_step
from rlhfkit.strategies.deepspeed.param_groups import groups_by_child

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class ConfigOf(Protocol):
    """The complete DeepSpeed configuration of a child."""

    def __call__(self, child: str, *, trainable: bool) -> dict[str, Any]:
        """Configuration of ``child``."""


def require_known_children(module: nn.Module, engine_configs: Mapping[str, Any]) -> None:
    """Refuse configuration entries for children that do not exist."""
    children = [name for name, _ in module.named_children()]
    unknown = sorted(set(engine_configs) - set(children))
    if unknown:
        raise MisconfigurationException(
            f"engine_configs names {unknown}, but the children of {type(module).__name__} are {children}."
        )


def training_engines(
    module: nn.Module, optimizers: Sequence[Optimizer], config_of: ConfigOf, device: torch.device
) -> tuple[dict[str, "DeepSpeedEngine"], list[tuple[Optimizer, dict[str, "DeepSpeedEngine"]]]]:
    """One engine per child that an optimizer updates.

    Args:
        module: The LightningModule.
        optimizers: What ``configure_optimizers`` returned.
        config_of: Configuration of a child.
        device: Of this rank.

    Returns:
        All engines by child name, and for each optimizer its own engines.

    Raises:
        MisconfigurationException: When ownership is ambiguous; before any engine is made.
    """
    owned: list[dict[str, list[dict[str, Any]]]] = []
    for optimizer in optimizers:
        if isinstance(optimizer, _MockOptimizer):
            raise MisconfigurationException(
                f"{type(module).__name__}.configure_optimizers returned no optimizer; there is nothing to train."
            )
        children = groups_by_child(module, optimizer)
        taken = {name for earlier in owned for name in earlier} & set(children)
        if taken:
            raise MisconfigurationException(
                f"Two optimizers update the child '{min(taken)}'; one DeepSpeed engine has one optimizer."
            )
        owned.append(children)
    made: list[tuple[Optimizer, dict[str, DeepSpeedEngine]]] = []
    for optimizer, children in zip(optimizers, owned, strict=True):
        engines = {}
        for name, groups in children.items():
            part = split_optimizer(optimizer, groups)
            engines[name] = create_engine(module.get_submodule(name), config_of(name, trainable=True), part, device)
            tag_outputs(engines[name], name)
        made.append((optimizer, engines))
    return {name: engine for _, engines in made for name, engine in engines.items()}, made


def place_others(
    module: nn.Module, names: Collection[str], config_of: ConfigOf, device: torch.device, dtype: torch.dtype | None
) -> tuple[set[str], dict[str, "DeepSpeedEngine"]]:
    """Place the children that are not trained: sharded inference engines where ZeRO 3 is configured, else plain.

    Returns:
        Names of all such children that have parameters, and the engines among them.
    """
    frozen: set[str] = set()
    engines = {}
    for name, child in module.named_children():
        if name not in names:
            continue
        if next(child.parameters(), None) is None:  # metrics and the like
            child.to(device)
            continue
        frozen.add(name)
        config = config_of(name, trainable=False)
        if "zero_optimization" in config:
            engines[name] = create_engine(child, config, None, device)
        else:
            place_frozen(child, device, dtype)
    return frozen, engines


def split_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and settings over some of ``optimizer``'s groups, sharing the group dictionaries.

    The class is not called again: its constructor may take other arguments than ``optimizer.defaults`` holds.
    """
    if len(groups) == len(optimizer.param_groups):
        return optimizer
    part = object.__new__(type(optimizer))
    # `step` is left out: a learning-rate scheduler binds a counting wrapper of it to the original instance.
    part.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    part.param_groups = groups
    part.state = defaultdict(dict)
    return part


def create_engine(
    child: nn.Module, config: dict[str, Any], optimizer: Optimizer | None, device: torch.device
) -> "DeepSpeedEngine":
    """Wrap a child module into a DeepSpeed engine: a training engine with an optimizer, an inference engine without."""
    import deepspeed

    arguments: dict[str, Any] = {}
    if optimizer is not None:
        arguments = {
            "optimizer": optimizer,
            "model_parameters": [p for group in optimizer.param_groups for p in group["params"]],
        }
    if device.type != "cpu":
        arguments["args"] = argparse.Namespace(device_rank=device.index)
    training = child.training
    engine, *_ = deepspeed.initialize(model=child, config=config, dist_init_required=False, **arguments)
    if optimizer is not None and engine.managed_gradient_accumulation():
        raise RuntimeError("DeepSpeed ignored 'managed_gradient_accumulation': false; update it to 0.19.8 or later.")
    if optimizer is not None:
        undo_initial_step(engine)
        clip_next_step(engine, 0.0)
    engine.train(training)
    return engine


def place_frozen(child: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move a frozen child that has no engine to the device, cast as DeepSpeed would, equal on all ranks.

    Only parameters are cast: buffers (for example rotary frequencies) stay in their precision. Reference and policy
    then compute in the same precision, so they agree exactly before the first update.

    Args:
        child: Module without an engine.
        device: Of this rank.
        dtype: The training precision, None to leave parameters as they are.
    """
    if dtype is not None:
        for parameter in child.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    child.to(device)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        for tensor in (*child.parameters(), *child.buffers()):
            torch.distributed.broadcast(tensor.data, src=0)
