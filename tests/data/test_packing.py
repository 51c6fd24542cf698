"""Properties of equal-token bins and of the plan of an iteration.

Covers packing.py.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data import packing
from rlhfkit.data.packing import (
    IterationShape,
    balanced_partition,
    best_fit_decreasing,
    capped_iteration_shape,
    deal_to_members,
    iteration_shape,
    plan_micro_batches,
)
from rlhfkit.data.token_cap import PaddedCost, plan_capped_micro_batches

token_counts = st.lists(st.integers(0, 4096), min_size=1, max_size=60)


def totals(lengths: list[int], bins: list[list[int]]) -> list[int]:
    return [sum(lengths[index] for index in rows) for rows in bins]


@given(lengths=token_counts, data=st.data())
def test_partition_has_every_index_once_no_empty_bin_and_keeps_grahams_bound(
    lengths: list[int], data: st.DataObject
) -> None:
    num_bins = data.draw(st.integers(1, len(lengths)))
    bins = balanced_partition(lengths, num_bins)
    assert len(bins) == num_bins
    assert all(bins)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in bins)
    assert bins == balanced_partition(lengths, num_bins)
    # Graham's bound (1966), which any list schedule keeps: mean + (1 - 1/m) * longest for m bins.
    assert max(totals(lengths, bins)) <= sum(lengths) / num_bins + (1 - 1 / num_bins) * max(lengths) + 1e-6


def differencing_by_hand(lengths: list[int], num_bins: int) -> list[list[int]]:
    """Largest differencing with every bin written out, also empty ones, as Karmarkar and Karp describe it."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    partitions = [
        (-lengths[index] if num_bins > 1 else 0, turn, [(lengths[index], [index])] + [(0, [])] * (num_bins - 1))
        for turn, index in enumerate(order)
    ]
    while len(partitions) > 1:
        partitions.sort(key=lambda partition: partition[:2])
        (_, _, one), (_, _, other), *partitions = partitions
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda entry: (-entry[0], entry[1]))
        partitions.append((merged[-1][0] - merged[0][0], 2 * len(order) - len(partitions), merged))
    return [rows for _, rows in partitions[0][2]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 8))
def test_the_fast_differencing_gives_the_partitions_of_the_plain_one(lengths: list[int], num_bins: int) -> None:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fast = packing._differencing(lengths, order, num_bins)
    assert list(map(sorted, fast)) == list(map(sorted, differencing_by_hand(lengths, num_bins)))


def test_sizes_of_an_iteration_are_those_of_its_groups_of_ranks() -> None:
    assert iteration_shape(72, 8, 4, 8, 12, 2) == iteration_shape(72, 8, 4, 8, 6) == IterationShape(576, 24, 3)
    assert capped_iteration_shape(9, 8, 3, 4) == IterationShape(72, 3, 3)
    assert capped_iteration_shape(2, 4, 4, 4, 2) == IterationShape(8, 4, 4)


def planned(num_updates: int, accumulate: int, world_size: int) -> Any:
    """Of eight rows."""
    return plan_micro_batches([1] * 8, num_updates=num_updates, accumulate=accumulate, world_size=world_size)


def planned_with_a_cap(num_updates: int, world_size: int) -> Any:
    """Of eight rows."""
    cost = PaddedCost([1] * 8)
    return plan_capped_micro_batches(cost, 8, max_tokens=9, num_updates=num_updates, world_size=world_size)


TOGETHER = r"3 data-parallel ranks \(world_size 6, of which 2 each"


@pytest.mark.parametrize(
    ("call", "sizes", "message"),
    [
        (balanced_partition, ([3, 4], 3), "cannot partition 2 sequences into 3 non-empty bins"),
        (balanced_partition, ([], 1), "cannot partition 0 sequences into 1"),
        (balanced_partition, ([3, 4], 0), "cannot partition 2 sequences into 0"),
        (balanced_partition, ([3, -1], 1), "lengths must be 0 or more, got -1"),
        (best_fit_decreasing, ([3, 11], 10), "11 tokens does not fit into 10"),
        (iteration_shape, (10, 0, 4, 2, 3), "group_size must be at least 1, got 0"),
        (
            iteration_shape,
            (10, 8, 4, 2, 3),
            r"10 \* group_size 8 = 80 .* 4 \* accumulate_grad_batches 2 \* world_size 3 ",
        ),
        (iteration_shape, (10, 8, 4, 2, 3), r"= 24 of them, .* an iteration of 72 or 96 sequences would"),
        (iteration_shape, (10, 8, 4, 2, 6, 2), rf"accumulate_grad_batches 2 \* {TOGETHER} .* = 24 of them"),
        (capped_iteration_shape, (9, 8, 5, 4), r"9 \* group_size 8 = 72 .* updates_per_iteration 5 does not"),
        (capped_iteration_shape, (2, 4, 4, 3), "2 for each of updates_per_iteration 4: fewer than world_size 3"),
        (capped_iteration_shape, (2, 4, 4, 6, 2), f"fewer than {TOGETHER}"),
        (planned, (0, 1, 1), "at least 1, got 0, 1, 1"),
        (planned, (3, 1, 1), "3 updates do not divide 8 sequences"),
        (planned, (4, 2, 2), r"each of 4 updates has 2 of 8 .* accumulate 2 \* world_size 2 = 4 micro-batches"),
        (planned_with_a_cap, (3, 1), "3 updates do not divide 8 sequences"),
        (planned_with_a_cap, (4, 3), "each of 4 updates has 2 of 8 sequences, fewer than world_size 3"),
    ],
)
def test_sizes_that_do_not_fit_name_all_numbers_and_the_cure(
    call: Callable[..., Any], sizes: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*sizes)


@given(
    updates=st.integers(1, 3),
    acc=st.integers(1, 3),
    world=st.sampled_from([1, 2, 3, 4]),
    per_bin=st.integers(1, 4),
    passes=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)
def test_one_rank_and_many_ranks_train_on_the_same_updates(
    updates: int, acc: int, world: int, per_bin: int, passes: int, seed: int
) -> None:
    """Also where each row is trained on in two passes."""
    generator = random.Random(seed)
    size = acc * world * per_bin
    lengths = [generator.randint(1, 2048) for _ in range(updates * size)]
    order = [row for _ in range(passes) for row in generator.sample(range(len(lengths)), len(lengths))]
    sizes = {"num_updates": passes * updates, "order": order}
    many = plan_micro_batches(lengths, accumulate=acc, world_size=world, **sizes)
    one = plan_micro_batches(lengths, accumulate=acc * world, world_size=1, **sizes)
    assert [len(share) for share in many] == [passes * updates * acc] * world
    for update in range(passes * updates):
        pieces = [batch.rows for share in many for batch in share if batch.update == update]
        assert sorted(itertools.chain(*pieces)) == sorted(order[update * size : (update + 1) * size])
        assert sorted(pieces) == sorted(batch.rows for batch in one[0] if batch.update == update)
    for share in many:
        assert [batch.update for batch in share] == [u for u in range(passes * updates) for _ in range(acc)]


def test_members_get_equal_tokens_and_take_turns_with_the_fullest_part() -> None:
    bins = [[0, 1, 2, 3], [4], [5], [], [6], [7]]
    lengths = [9, 5, 4, 8, 1, 1, 1, 1]
    dealt = deal_to_members(bins, lengths, world_size=4, ranks_per_forward=2)
    assert dealt == [[0, 2], [1, 3], [4], [], [], [5], [], [], [6], [], [7], []]
    # Ranks 0 and 1 take bins 0, 2 and 4; ranks 2 and 3 the others.
    assert [dealt[rank::4] for rank in range(4)] == [[[0, 2], [], [6]], [[1, 3], [5], []], [[4], [], [7]], [[], [], []]]
    assert deal_to_members(bins, lengths, world_size=4, ranks_per_forward=1) == bins


def test_ranks_work_on_micro_batches_of_one_size_at_a_time() -> None:
    lengths = [100, 90, 80, 70, 10, 10, 10, 10]
    plan = plan_micro_batches(lengths, num_updates=1, accumulate=2, world_size=2)
    sizes = [totals(lengths, [batch.rows for batch in share]) for share in plan]
    assert all(abs(a - b) <= 10 for a, b in zip(*sizes, strict=True))
    assert sum(map(sum, sizes)) == sum(lengths)


@given(lengths=st.lists(st.integers(1, 100), max_size=60), spare=st.integers(0, 60))
def test_bins_are_as_full_as_when_every_bin_is_looked_at_for_every_item(lengths: list[int], spare: int) -> None:
    capacity, rooms = max(lengths, default=1) + spare, list[int]()
    for length in sorted(lengths, reverse=True):
        best = min((room for room in rooms if room >= length), default=capacity)
        if best in rooms:
            rooms.remove(best)
        rooms.append(best - length)
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert sorted(totals(lengths, bins)) == sorted(capacity - room for room in rooms)


def test_ties_follow_the_order_that_is_given() -> None:
    assert best_fit_decreasing([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert best_fit_decreasing([5, 5, 5, 5], 10, order=[3, 0, 2, 1]) == [[0, 3], [1, 2]]
