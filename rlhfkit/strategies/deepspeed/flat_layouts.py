"""Which parameters lie where in the flat tensors of DeepSpeed's ZeRO optimizers, for optimizers of whole matrices.

deepspeed 0.19.8 gives its optimizer flat float32 tensors. At stages 1 and 2, the parameters of a group lie behind each
other in one, of which each rank has an equal slice (``zero/stage_1_and_2.py``). At stage 3, each parameter is divided
into equal slices, and those of a rank lie behind each other (``zero/stage3.py``).
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.distributed import full_shape
from rlhfkit.flat_parameters import FlatLayout, Fragment

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


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
