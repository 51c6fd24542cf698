"""Ring attention on four ranks, and in the same processes on two groups of two."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel import sequence_ranks
from rlhfkit.mesh import ForwardGroup, Mesh
from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout
from rlhfkit.models.attention.packed import packed_attention
from rlhfkit.models.parallel.ring import RingAttention, zigzag_blocks

CPU = torch.device("cpu")
ROWS = {
    "one sequence": ([61], [0]),
    "shared prefixes": ([5, 9, 20, 1, 7, 7, 12, 40, 3], [0, 3, 7, 0, 0, 7, 2, 0, 1]),
    "short sequences": ([4, 6, 3, 8, 5, 2, 7], [0] * 7),
    "fewer tokens than ranks": ([2], [0]),
}
HEADS = {"grouped heads": (6, 2), "one head": (1, 1)}


def dealings(layout: PackedLayout, parts: int) -> dict[str, list[Tensor]]:
    """Ways to deal the tokens of a row."""
    count = len(layout.tokens)
    return {
        "zigzag": zigzag_blocks(layout, parts),
        "contiguous": list(torch.arange(count).tensor_split(parts)),
        "one rank has all": [torch.arange(count if rank == 1 else 0) for rank in range(parts)],
    }


def tensors(heads: tuple[int, int], count: int, dtype: torch.dtype) -> list[Tensor]:
    """(1, heads, N, D) queries, keys and values, and the weights of the outputs in the loss; equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    sizes = ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    made = [torch.randn(1, number, count, size, generator=generator, dtype=torch.float64) for number, size in sizes]
    made.append(torch.randn(1, count, heads[0], 6, generator=generator, dtype=torch.float64))
    return [tensor.to(dtype) for tensor in made]


def whole(
    layout: PackedLayout, inputs: list[Tensor], window: int | None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Output and gradients of packed attention on one rank, in ``dtype`` if it is not that of the inputs."""
    query, key, value, weights = (x.to(dtype or x.dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (query.clone(), key.clone(), value.clone())]
    out, _ = packed_attention(
        torch.nn.Identity(), *leaves, None, scaling=0.3, sliding_window=window, packed_layout=layout, kernel="buckets"
    )
    return [out.detach()[0], *(x[0] for x in torch.autograd.grad((out * weights).sum(), leaves))]


def in_ring(ring: RingAttention, layout: PackedLayout, inputs: list[Tensor], window: int | None) -> list[Tensor]:
    """Output and gradients of this rank's tokens."""
    tokens = ring.blocks[ring.rank]
    leaves = [x[0][:, tokens].requires_grad_() for x in inputs[:3]]
    out = ring(*leaves, layout, None, AttentionOptions(scaling=0.3, window=window))
    return [out.detach(), *torch.autograd.grad((out * inputs[3][0][tokens]).sum(), leaves)]


def difference(
    ring: RingAttention, layout: PackedLayout, inputs: list[Tensor], expected: list[Tensor], window: int | None
) -> float:
    """Largest difference of outputs and gradients, relative to the largest number of all."""
    tokens = ring.blocks[ring.rank]
    found = in_ring(ring, layout, inputs, window)
    return largest(found, [expected[0][tokens], *(x[:, tokens] for x in expected[1:])], expected)


def largest(one: list[Tensor], other: list[Tensor], scale: list[Tensor]) -> float:
    """Largest difference of two lists of tensors, relative to the largest number of ``scale``."""
    far = [float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True) if a.numel()]
    return max(far, default=0.0) / max(float(x.abs().max()) for x in scale)


def everything(**_: Any) -> None:
    """Rings of two and four ranks, for any row, heads, window and dealing; and models."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cases = itertools.product(((4, dist.group.WORLD), (2, pairs[rank // 2])), ROWS, HEADS, (None, 5))
    for (ranks, group), row, heads, window in cases:
        if row != "shared prefixes" and (window is not None or heads == "one head"):
            continue
        layout = PackedLayout.from_lengths(ROWS[row][0], CPU, ROWS[row][1])
        exact = tensors(HEADS[heads], len(layout.tokens), torch.float64)
        expected = whole(layout, exact, window)
        for dealing, blocks in dealings(layout, ranks).items():
            ring = RingAttention(tuple(blocks), dist.get_rank(group), group, tile=4)
            name = f"{ranks} ranks, {row}, {heads}, window {window}, {dealing}"
            apart = difference(ring, layout, exact, expected, window)
            assert apart < 1e-12, f"{name}: {apart}"
            if dealing != "zigzag":
                continue
            single = tensors(HEADS[heads], len(layout.tokens), torch.float32)
            apart = difference(ring, layout, single, whole(layout, single, window, torch.float64), window)
            assert apart < 1e-6, f"{name}, float32: {apart}"
            half = tensors(HEADS[heads], len(layout.tokens), torch.bfloat16)
            same = whole(layout, half, window, torch.float64)
            rounding = largest(whole(layout, half, window), same, same)
            apart = difference(ring, layout, half, same, window) / rounding
            assert apart < 1.2, f"{name}, bfloat16, as a share of what packed attention rounds: {apart}"
    for ranks in (2, 4):
        sequence_ranks.compare(ForwardGroup.create(Mesh(rank, 4, sequence=ranks), "ring"), sequence_ranks.RING_CASES)


def calls_of_groups(**_: Any) -> dict[str, list[str]]:
    """What this rank calls, in order, by process group of a mesh of 2 sequence and 2 tensor ranks, and of 4 and 1.

    Then the row of a ring of four.
    """
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=4)
    calls: dict[str, list[str]] = {}

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            group = first[0].group if name == "batch_isend_irecv" else options.get("group")
            calls.setdefault("default" if group is None else group.group_name, []).append(name)
            return function(first, *arguments, **options)

        return call

    for name in ("all_reduce", "batch_isend_irecv", "all_to_all_single", "all_gather_object", "broadcast"):
        setattr(dist, name, recorded(name))
    ForwardGroup.create(Mesh(rank, 4, sequence=2, tensor=2))
    group = ForwardGroup.create(Mesh(rank, 4, sequence=4), "ring").sequence
    layout = PackedLayout.from_lengths([9, 9, 18], CPU)
    ring = RingAttention(tuple(torch.arange(36).chunk(4)), rank, group)
    in_ring(ring, layout, tensors((1, 1), 36, torch.float32), None)
    calls["ring"] = calls.get(group.group_name, [])
    return calls
