"""Ring attention against packed attention on one rank; four ranks, which are two rings of two as well."""

from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks

from models.parallel import ring_ranks
from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout
from rlhfkit.models.parallel.ring import TILE_SCORES, RingAttention, Visibility, tile_size, tiles_of, zigzag_blocks

CPU = torch.device("cpu")
SHARED = PackedLayout.from_lengths([5, 9, 20, 1, 7, 7, 12, 40, 3], CPU, [0, 3, 7, 0, 0, 7, 2, 0, 1])
"""Prefixes that two and three neighbours share, of which one shares less; and a row that is a copy."""


@pytest.mark.distributed
def test_outputs_and_gradients_are_those_of_one_rank_up_to_rounding(tmp_path: Path) -> None:
    ranks.run("models.parallel.ring_ranks:everything", ranks=4, folder=tmp_path)


@pytest.mark.distributed
def test_the_first_call_of_each_group_is_made_by_all_of_its_ranks(tmp_path: Path) -> None:
    # NCCL connects the ranks of a group in its first call: one that only some of them make would wait for the others.
    calls: list[dict[str, Any]] = ranks.run("models.parallel.ring_ranks:calls_of_groups", ranks=4, folder=tmp_path)
    rings = [of_rank.pop("ring") for of_rank in calls]
    assert ["batch_isend_irecv" in ring for ring in rings] == [True] * 4
    groups = {name for of_rank in calls for name in of_rank}
    assert len(groups) == (1 + 2 + 2) + (1 + 1), "of members, sequence ranks and tensor ranks, of both meshes"
    for name in groups:
        assert {of_rank[name][0] for of_rank in calls if name in of_rank} == {"all_reduce"}, name
    assert [len(of_rank) for of_rank in calls] == [5] * 4


@pytest.mark.parametrize("window", [None, 5])
def test_one_rank_needs_no_others(window: int | None) -> None:
    inputs = ring_ranks.tensors((6, 2), len(SHARED.tokens), torch.float64)
    ring = RingAttention((torch.arange(len(SHARED.tokens)),), 0, None)
    expected = ring_ranks.whole(SHARED, inputs, window)
    assert ring_ranks.difference(ring, SHARED, inputs, expected, window) < 1e-12


def test_without_gradients_nothing_is_kept() -> None:
    layout = PackedLayout.from_lengths([9], CPU)
    query, key, value, _ = (x[0] for x in ring_ranks.tensors((2, 1), 9, torch.float64))
    out = RingAttention((torch.arange(9),), 0, None)(query, key, value, layout, None, AttentionOptions())
    assert out.grad_fn is None


def test_dropout_is_refused() -> None:
    query = torch.ones(1, 9, 4)
    with pytest.raises(ValueError, match=r"no dropout of attention probabilities \(0\.1\)"):
        RingAttention((torch.arange(9),), 0, None)(query, query, query, SHARED, None, AttentionOptions(dropout=0.1))


def test_large_scores_do_not_overflow() -> None:
    layout = PackedLayout.from_lengths([9], CPU)
    inputs = ring_ranks.tensors((2, 1), 9, torch.float32)
    inputs[0], inputs[1] = 100 * inputs[0], 100 * inputs[1]
    ring = RingAttention((torch.arange(9),), 0, None, tile=4)
    out = ring(*(x[0] for x in inputs[:3]), layout, None, AttentionOptions(scaling=0.3))
    exact = ring_ranks.whole(layout, inputs, None, torch.float64)[0]
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


def test_scores_in_memory_are_bounded() -> None:
    assert [tile_size(heads) for heads in (1, 8, 32, 128)] == [2048, 1024, 512, 256]
    assert all(heads * tile_size(heads) ** 2 <= TILE_SCORES for heads in (3, 24, 96))


def reference_mask(window: int | None) -> torch.Tensor:
    """(N, N) bool from the places of each sequence's tokens."""
    count = len(SHARED.tokens)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for row, (length, prefix) in enumerate(zip(SHARED.lengths, SHARED.prefixes, strict=True)):
        places = SHARED.places[row, :length]
        for position in range(prefix, length):
            first = 0 if window is None else max(0, position - window + 1)
            mask[places[position], places[first : position + 1]] = True
    return mask


@pytest.mark.parametrize("parts", [1, 4])
def test_tiles_have_every_visible_pair_once_and_leave_out_keys_that_nobody_sees(parts: int) -> None:
    mask, blocks = reference_mask(None), zigzag_blocks(SHARED, parts)
    starts = SHARED.places[Visibility.of_row(SHARED).first, 0]
    computed = 0
    for queries in blocks:
        for keys in blocks:
            covered = torch.zeros(len(queries), len(keys), dtype=torch.int64)
            for tile in tiles_of(starts, queries, keys, 4):
                covered[tile] += 1
            assert int(covered.max()) <= 1
            assert covered.bool()[mask[queries][:, keys]].all()
            computed += int(covered.sum())
    assert computed < 0.6 * mask.numel()


ROWS = {
    "one sequence": ([4096], [0]),
    "one after short ones": ([64] * 40 + [3000], [0] * 41),
    "responses to a long prompt": ([1100 + 60 * i for i in range(6)], [0, *[1000] * 5]),
    "short sequences": ([100] * 40, [0] * 40),
    "fewer tokens than ranks": ([2, 1], [0, 0]),
}


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("row", ROWS)
def test_every_token_is_dealt_once_ascending_and_all_ranks_get_equally_much(row: str, parts: int) -> None:
    layout = PackedLayout.from_lengths(ROWS[row][0], CPU, ROWS[row][1])
    blocks = zigzag_blocks(layout, parts)
    assert torch.cat(blocks).sort().values.tolist() == list(range(len(layout.tokens)))
    assert all(block.equal(block.sort().values) for block in blocks)
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 2
    keys_seen = layout.position_ids[0] + 1
    work = [int(keys_seen[block].sum()) for block in blocks]
    assert "one" not in row or max(work) * parts < 1.02 * sum(work)
