"""Ring attention against packed attention on one rank; four ranks, which are two rings of two as well."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import Tensor

from models.parallel.test_joined_rows import RING_CASES, compare
from rlhfkit.mesh import ForwardGroup, Mesh
from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout
from rlhfkit.models.attention.packed import packed_attention
from rlhfkit.models.parallel.ring import TILE_SCORES, RingAttention, Visibility, tile_size, tiles_of, zigzag_blocks

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
    for (size, group), row, heads, window in cases:
        if row != "shared prefixes" and (window is not None or heads == "one head"):
            continue
        layout = PackedLayout.from_lengths(ROWS[row][0], CPU, ROWS[row][1])
        exact = tensors(HEADS[heads], len(layout.tokens), torch.float64)
        expected = whole(layout, exact, window)
        for dealing, blocks in dealings(layout, size).items():
            ring = RingAttention(tuple(blocks), dist.get_rank(group), group, tile=4)
            name = f"{size} ranks, {row}, {heads}, window {window}, {dealing}"
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
    for size in (2, 4):
        compare(ForwardGroup.create(Mesh(rank, 4, sequence=size), "ring"), RING_CASES)


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


SHARED = PackedLayout.from_lengths([5, 9, 20, 1, 7, 7, 12, 40, 3], CPU, [0, 3, 7, 0, 0, 7, 2, 0, 1])
"""Prefixes that two and three neighbours share, of which one shares less; and a row that is a copy."""


@pytest.mark.distributed
def test_outputs_and_gradients_are_those_of_one_rank_up_to_rounding(tmp_path: Path) -> None:
    ranks.run(everything, ranks=4, folder=tmp_path)


@pytest.mark.distributed
def test_the_first_call_of_each_group_is_made_by_all_of_its_ranks(tmp_path: Path) -> None:
    # NCCL connects the ranks of a group in its first call: one that only some of them make would wait for the others.
    calls: list[dict[str, Any]] = ranks.run(calls_of_groups, ranks=4, folder=tmp_path)
    rings = [of_rank.pop("ring") for of_rank in calls]
    assert ["batch_isend_irecv" in ring for ring in rings] == [True] * 4
    groups = {name for of_rank in calls for name in of_rank}
    assert len(groups) == (1 + 2 + 2) + (1 + 1), "of members, sequence ranks and tensor ranks, of both meshes"
    for name in groups:
        assert {of_rank[name][0] for of_rank in calls if name in of_rank} == {"all_reduce"}, name
    assert [len(of_rank) for of_rank in calls] == [5] * 4


@pytest.mark.parametrize("window", [None, 5])
def test_one_rank_needs_no_others(window: int | None) -> None:
    inputs = tensors((6, 2), len(SHARED.tokens), torch.float64)
    ring = RingAttention((torch.arange(len(SHARED.tokens)),), 0, None, tile=4)
    expected = whole(SHARED, inputs, window)
    assert difference(ring, SHARED, inputs, expected, window) < 1e-12


def test_dropout_is_refused() -> None:
    query = torch.ones(1, 9, 4)
    with pytest.raises(ValueError, match=r"no dropout of attention probabilities \(0\.1\)"):
        RingAttention((torch.arange(9),), 0, None)(query, query, query, SHARED, None, AttentionOptions(dropout=0.1))


def test_large_scores_do_not_overflow() -> None:
    layout = PackedLayout.from_lengths([9], CPU)
    inputs = tensors((2, 1), 9, torch.float32)
    inputs[0], inputs[1] = 100 * inputs[0], 100 * inputs[1]
    ring = RingAttention((torch.arange(9),), 0, None, tile=4)
    out = ring(*(x[0] for x in inputs[:3]), layout, None, AttentionOptions(scaling=0.3))
    exact = whole(layout, inputs, None, torch.float64)[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def test_scores_in_memory_are_bounded() -> None:
    assert [tile_size(heads) for heads in (1, 8, 32, 128)] == [2048, 1024, 512, 256]
    assert all(heads * tile_size(heads) ** 2 <= TILE_SCORES for heads in (3, 24, 96))


@pytest.mark.parametrize("parts", [1, 4])
def test_tiles_leave_out_keys_that_nobody_sees(parts: int) -> None:
    """That they have every pair that is seen once, the outputs show."""
    blocks, starts = zigzag_blocks(SHARED, parts), SHARED.places[Visibility.of_row(SHARED).first, 0]
    tiles = [(tile, q, k) for q in blocks for k in blocks for tile in tiles_of(starts, q, k, 4)]
    computed = sum(len(q[of_q]) * len(k[of_k]) for (of_q, of_k), q, k in tiles)
    assert computed < 0.6 * len(SHARED.tokens) ** 2


DEALT = {
    "one sequence": ([4096], [0]),
    "one after short ones": ([64] * 40 + [3000], [0] * 41),
    "responses to a long prompt": ([1100 + 60 * i for i in range(6)], [0, *[1000] * 5]),
    "short sequences": ([100] * 40, [0] * 40),
    "fewer tokens than ranks": ([2, 1], [0, 0]),
}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("row", DEALT)
def test_every_token_is_dealt_once_ascending_and_all_ranks_get_equally_much(row: str, parts: int) -> None:
    layout = PackedLayout.from_lengths(DEALT[row][0], CPU, DEALT[row][1])
    blocks = zigzag_blocks(layout, parts)
    assert torch.cat(blocks).sort().values.tolist() == list(range(len(layout.tokens)))
    assert all(block.equal(block.sort().values) for block in blocks)
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 2
    keys_seen = layout.position_ids[0] + 1
    work = [int(keys_seen[block].sum()) for block in blocks]
    assert "one" not in row or max(work) * parts < 1.02 * sum(work)
