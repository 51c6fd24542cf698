"""What a rank computes in a ring, against masks made from the places of each sequence's tokens."""

import pytest
import torch
from torch import Tensor

from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.parallel.ring_plan import RingPlan, RowVisibility

CPU = torch.device("cpu")
LAYOUT = PackedLayout.from_lengths([5, 9, 20, 1, 7, 7, 12, 40, 3], CPU, [0, 3, 7, 0, 0, 7, 2, 0, 1])
"""Prefixes that two and three neighbours share, of which one shares less; and a row that is a copy."""
COUNT = len(LAYOUT.tokens)
WINDOWS = [None, 1, 4]
MIXED = list(torch.randperm(COUNT, generator=torch.Generator().manual_seed(0)).tensor_split([11, 11, 40]))
BLOCKS = {"contiguous": list(torch.arange(COUNT).tensor_split(4)), "any order, one empty": MIXED}


def reference_mask(window: int | None) -> Tensor:
    """(N, N) bool from the places of each sequence's tokens."""
    mask = torch.zeros(COUNT, COUNT, dtype=torch.bool)
    for row, (length, prefix) in enumerate(zip(LAYOUT.lengths, LAYOUT.prefixes, strict=True)):
        places = LAYOUT.places[row, :length]
        for position in range(prefix, length):
            first = 0 if window is None else max(0, position - window + 1)
            mask[places[position], places[first : position + 1]] = True
    return mask


@pytest.mark.parametrize("window", WINDOWS)
def test_a_token_sees_its_sequence_with_its_prefixes_and_no_later_token(window: int | None) -> None:
    tokens = RowVisibility(LAYOUT).tokens
    assert tokens.mask(tokens, window).equal(reference_mask(window))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_visible_pairs_of_blocks_are_counted(blocks: str, window: int | None) -> None:
    mask, parts = reference_mask(window), BLOCKS[blocks]
    counted = RowVisibility(LAYOUT).visible_pairs(parts, window)
    assert counted.tolist() == [[int(mask[queries][:, keys].sum()) for keys in parts] for queries in parts]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_tiles_are_exactly_those_in_which_something_is_visible(
    blocks: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhfkit.models.parallel.ring_plan.SMALLEST_TILE", 4)
    mask, parts, row = reference_mask(window), BLOCKS[blocks], RowVisibility(LAYOUT)
    for own, queries in enumerate(parts):
        plan = RingPlan.of_row(row, parts, own, window, 4, CPU)
        for block, keys in enumerate(parts):
            visible = mask[queries][:, keys]
            seen = torch.zeros_like(visible)
            for tile in plan.tiles[block]:
                inside = (tile.queries, tile.keys)
                assert visible[inside].any()
                assert visible[inside].numel() <= 16
                assert tile.whole == bool(visible[inside].all())
                of_tile = plan.mask(tile, block)
                assert not seen[inside].any()
                seen[inside] = True if of_tile is None else of_tile
            assert seen.equal(visible)


def test_a_block_travels_to_the_last_rank_that_sees_it() -> None:
    layout = PackedLayout.from_lengths([6, 2], CPU)
    parts = [torch.arange(0, 2), torch.arange(2, 4), torch.arange(4, 6), torch.arange(6, 8)]
    hops = [RingPlan.of_row(RowVisibility(layout), parts, 0, window, 64, CPU).hops for window in (None, 2)]
    assert hops == [(2, 1, 0, 0), (1, 1, 0, 0)]
    assert RingPlan.of_row(RowVisibility(layout), parts[::-1], 0, None, 64, CPU).hops == (0, 0, 3, 3)


def test_tiles_are_no_larger_than_what_a_query_sees_on_average() -> None:
    layout = PackedLayout.from_lengths([200] * 20, CPU)
    plan = RingPlan.of_row(RowVisibility(layout), [torch.arange(4000)], 0, None, 2048, CPU)
    assert {tile.queries.stop - tile.queries.start for tile in plan.tiles[0]} == {128, 4000 % 128}
