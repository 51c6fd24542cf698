"""Parameter groups of one torch optimizer, by the child modules that own them, and the flat tensors made of them."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.distributed import full_shape
from rlhfkit.flat_parameters import FlatLayout, Fragment

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def groups_by_child(module: nn.Module, optimizer: Optimizer) -> dict[str, list[dict[str, Any]]]:
    """Sort the parameter groups of an optimizer by the direct child of ``module`` that owns their parameters.

    A DeepSpeed engine shards, clips and steps whole groups, so each must belong to one child; a child may have several.
    The groups are the optimizer's dictionaries, not copies: a learning-rate scheduler on it changes the engines too.

    Raises MisconfigurationException if a parameter is outside all children or shared by two, a group spans children, or
    the optimizer has only a part of the trainable parameters of a child.
    """
    children_of: dict[int, list[str]] = defaultdict(list)
    for child_name, child in module.named_children():
        for parameter in child.parameters():
            children_of[id(parameter)].append(child_name)
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    owned: dict[str, list[dict[str, Any]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        owners: dict[str, str] = {}
        for parameter in group["params"]:
            name = names.get(id(parameter), "<not a parameter of the module>")
            found = children_of.get(id(parameter), [])
            if len(found) != 1:
                where = f"shared by the children {found}" if found else "outside every child module"
                raise MisconfigurationException(
                    f"The optimizer updates the parameter '{name}', which is {where} of {type(module).__name__}. Every"
                    " updated parameter must belong to exactly one direct child, because each child becomes one"
                    " DeepSpeed engine. Put it into a child module (a shared backbone with two heads is one child)."
                )
            owners.setdefault(found[0], name)
        if len(owners) > 1:
            raise MisconfigurationException(
                f"Parameter group {index} of {type(optimizer).__name__} spans the children {sorted(owners)} of"
                f" {type(module).__name__}. Give every child its own group(s), for example AdamW(["
                + ", ".join(f"{{'params': self.{name}.parameters()}}" for name in owners)
                + "])."
            )
        for name in owners:
            owned.setdefault(name, []).append(group)
    for name, groups in owned.items():
        _require_complete(module, name, groups)
    return owned


def _require_complete(module: nn.Module, child_name: str, groups: list[dict[str, Any]]) -> None:
    """Raise if the optimizer lacks trainable parameters of a child, whose gradients would accumulate without end."""
    covered = {id(parameter) for group in groups for parameter in group["params"]}
    child = module.get_submodule(child_name)
    left_out = [n for n, p in child.named_parameters() if p.requires_grad and id(p) not in covered]
    if left_out:
        shown = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
        raise MisconfigurationException(
            f"{len(left_out)} parameter(s) of '{child_name}' require gradients but are in no parameter group of the"
            f" optimizer: {shown}. Add them to the optimizer or call requires_grad_(False) on them."
        )


# ---------------------------------------------------------------- flat tensors of groups
#
# deepspeed 0.19.8 gives its optimizer flat float32 tensors. At stages 1 and 2, the parameters of a group lie behind
# each other in one, of which each rank has an equal slice (``zero/stage_1_and_2.py``). At stage 3, each parameter is
# divided into equal slices, and those of a rank lie behind each other (``zero/stage3.py``).


def flat_layouts(engine: "DeepSpeedEngine", device: torch.device) -> list[tuple[Tensor, FlatLayout]]:
    """Each flat tensor of an engine's optimizer with its layout; none at stage 0, where parameters are whole."""
    if not engine.zero_optimization():
        return []
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [
            (flat, _of_slices(parameters, group, device))
            for (flat, parameters), group in zip(pairs, optimizer.sub_group_process_groups, strict=True)
        ]
    return [_of_group(optimizer, number, device) for number in range(len(optimizer.bit16_groups))]


def _of_group(optimizer: Any, number: int, device: torch.device) -> tuple[Tensor, FlatLayout]:
    """Of a parameter group at stages 1 and 2."""
    group = optimizer.real_dp_process_group[number]
    ranks, size = dist.get_world_size(group), int(optimizer.partition_size[number])
    parameters = optimizer.round_robin_bit16_groups[number]
    fragments = []
    for parameter, offset in zip(parameters, optimizer.round_robin_bit16_offsets[number], strict=True):
        parts = []
        for rank in range(ranks):
            first = max(offset, rank * size)
            last = min(offset + parameter.numel(), (rank + 1) * size)
            parts.append(Fragment(first - rank * size, last - first) if last > first else Fragment(0, 0))
        fragments.append(tuple(parts))
    shapes = tuple(tuple(parameter.shape) for parameter in parameters)
    layout = FlatLayout(shapes, tuple(fragments), dist.get_rank(group), group, device)
    return optimizer.single_partition_of_fp32_groups[number], layout


def _of_slices(parameters: list[Any], group: Any, device: torch.device) -> FlatLayout:
    """Of a group of parameters at stage 3."""
    fragments, offset = [], 0
    for parameter in parameters:
        size = int(parameter.partition_numel())
        left = [
            int(parameter.ds_numel) - rank * size for rank in range(dist.get_world_size(group))
        ]  # the last is padded
        fragments.append(tuple(Fragment(offset, min(size, rest)) if rest > 0 else Fragment(0, 0) for rest in left))
        offset += size
    shapes = tuple(full_shape(parameter) for parameter in parameters)
    return FlatLayout(shapes, tuple(fragments), dist.get_rank(group), group, device)
