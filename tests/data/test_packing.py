"""Properties of equal-token bins and of the plan of an iteration.

Covers packing.py.
"""

import itertools
import random
import time
from functools import partial

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
    split_by_tokens,
)
from rlhfkit.data.token_cap import PackedCost

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


@pytest.mark.parametrize(
    ("lengths", "num_bins", "message"),
    [
        ([3, 4], 3, "cannot partition 2 sequences into 3 non-empty bins"),
        ([], 1, "cannot partition 0 sequences into 1"),
        ([3, 4], 0, "cannot partition 2 sequences into 0"),
        ([3, -1], 1, "lengths must be 0 or more, got -1"),
    ],
)
def test_impossible_partitions_say_why(lengths: list[int], num_bins: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced_partition(lengths, num_bins)


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


def test_an_iteration_of_sixteen_thousand_samples_is_planned_in_a_moment() -> None:
    """16 updates of 256 micro-batches took 38 s when each merge of partitions wrote out every bin."""
    generator = random.Random(0)
    groups = [number // 16 for number in range(16_384)]
    prompts = [100 + 7 * group % 300 for group in groups]
    lengths = [prompt + min(int(generator.lognormvariate(7.5, 0.9)) + 1, 16_384) for prompt in prompts]
    split = partial(PackedCost(lengths, prompts, groups).split, ranks=64)
    start = time.process_time()
    plan = plan_micro_batches(lengths, num_updates=16, accumulate=4, world_size=64, split=split)
    assert time.process_time() - start < 2  # 0.15 s
    assert sorted(row for share in plan for batch in share for row in batch.rows) == list(range(16_384))


@given(
    updates=st.integers(1, 4),
    group=st.integers(1, 8),
    micro=st.integers(1, 8),
    acc=st.integers(1, 4),
    world=st.integers(1, 4),
)
def test_every_sequence_is_in_one_micro_batch(updates: int, group: int, micro: int, acc: int, world: int) -> None:
    shape = iteration_shape(updates * micro * acc * world, group, micro, acc, world)
    assert shape.updates == updates * group
    assert shape.micro_batches_per_rank * world * micro == shape.sequences
    assert shape.micro_batches_per_rank == shape.updates * acc


def test_sizes_that_do_not_divide_name_all_numbers_and_the_cure() -> None:
    with pytest.raises(
        ValueError, match=r"10 \* group_size 8 = 80 .* 4 \* accumulate_grad_batches 2 \* world_size 3 = 24 .* 72 or 96"
    ):
        iteration_shape(10, 8, 4, 2, 3)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        iteration_shape(10, 0, 4, 2, 3)
    assert iteration_shape(72, 8, 4, 8, 12, 2) == iteration_shape(72, 8, 4, 8, 6)
    with pytest.raises(ValueError, match=r"2 \* 3 data-parallel ranks \(world_size 6, of which 2 each .* = 24 of them"):
        iteration_shape(10, 8, 4, 2, 6, 2)


def test_sizes_of_an_iteration_with_a_cap_say_what_does_not_fit() -> None:
    assert capped_iteration_shape(9, 8, 3, 4) == IterationShape(72, 3, 3)
    with pytest.raises(ValueError, match=r"9 .* group_size 8 = 72 sequences, which updates_per_iteration 5 does not"):
        capped_iteration_shape(9, 8, 5, 4)
    with pytest.raises(ValueError, match="2 for each of updates_per_iteration 4: fewer than world_size 3"):
        capped_iteration_shape(2, 4, 4, 3)
    assert capped_iteration_shape(2, 4, 4, 4, 2) == IterationShape(8, 4, 4)
    with pytest.raises(ValueError, match=r"fewer than 3 data-parallel ranks \(world_size 6, of which 2 each"):
        capped_iteration_shape(2, 4, 4, 6, 2)


@given(
    updates=st.integers(1, 3),
    acc=st.integers(1, 3),
    world=st.sampled_from([1, 2, 3, 4]),
    per_bin=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_one_rank_and_many_ranks_train_on_the_same_updates(
    updates: int, acc: int, world: int, per_bin: int, seed: int
) -> None:
    generator = random.Random(seed)
    lengths = [generator.randint(1, 2048) for _ in range(updates * acc * world * per_bin)]
    order = generator.sample(range(len(lengths)), len(lengths))
    many = plan_micro_batches(lengths, num_updates=updates, accumulate=acc, world_size=world, order=order)
    one = plan_micro_batches(lengths, num_updates=updates, accumulate=acc * world, world_size=1, order=order)
    assert [len(share) for share in many] == [updates * acc] * world
    for update in range(updates):
        piece = order[update * acc * world * per_bin : (update + 1) * acc * world * per_bin]
        pieces = [batch.rows for share in many for batch in share if batch.update == update]
        assert sorted(itertools.chain(*pieces)) == sorted(piece)
        assert sorted(pieces) == sorted(batch.rows for batch in one[0] if batch.update == update)
    for share in many:
        assert [batch.update for batch in share] == [update for update in range(updates) for _ in range(acc)]


@given(
    updates=st.integers(1, 2),
    acc=st.integers(1, 3),
    data=st.integers(1, 3),
    together=st.integers(2, 4),
    per_bin=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_ranks_that_share_micro_batches_train_on_the_rows_of_one_that_does_not(
    updates: int, acc: int, data: int, together: int, per_bin: int, seed: int
) -> None:
    generator = random.Random(seed)
    count = updates * acc * data * per_bin
    lengths = [generator.randint(1, 2048) for _ in range(count)]
    groups = sorted(generator.randrange(5) for _ in range(count))
    sizes = {"num_updates": updates, "accumulate": acc}
    alone = plan_micro_batches(lengths, world_size=data, **sizes)
    shared = plan_micro_batches(lengths, world_size=data * together, ranks_per_forward=together, groups=groups, **sizes)
    for number, own in enumerate(alone):
        members = shared[number * together : (number + 1) * together]
        assert [len(share) for share in members] == [len(own)] * together
        for batch, *parts in zip(own, *members, strict=True):
            assert sorted(row for part in parts for row in part.rows) == batch.rows
            assert all(part.trained == bool(part.rows) for part in parts)
            owners = [{groups[row] for row in part.rows} for part in parts]
            assert sum(map(len, owners)) == len(set().union(*owners))  # samples of a prompt are on one rank


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


def test_a_row_that_occurs_in_two_passes_is_trained_on_twice() -> None:
    plan = plan_micro_batches([5, 6, 7, 8], num_updates=2, accumulate=2, world_size=1, order=[0, 1, 2, 3] * 2)
    rows = [row for batch in plan[0] for row in batch.rows]
    assert sorted(rows) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_plans_that_do_not_divide_say_why() -> None:
    with pytest.raises(ValueError, match="3 updates do not divide 8 sequences"):
        plan_micro_batches([1] * 8, num_updates=3, accumulate=1, world_size=1)
    with pytest.raises(
        ValueError, match=r"each of 4 updates has 2 of 8 .* accumulate 2 \* world_size 2 = 4 micro-batches"
    ):
        plan_micro_batches([1] * 8, num_updates=4, accumulate=2, world_size=2)
    with pytest.raises(ValueError, match="at least 1, got 0, 1, 1"):
        plan_micro_batches([1] * 8, num_updates=0, accumulate=1, world_size=1)


def best_fit_by_hand(lengths: list[int], capacity: int) -> list[list[int]]:
    """Look at every bin for every item; of bins with equal room, the one that got it last."""
    bins: list[list[int]] = []
    touched: list[int] = []
    for turn, index in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        rooms = [capacity - sum(lengths[other] for other in rows) for rows in bins]
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[index]]
        if not fitting:
            bins.append([index])
            touched.append(turn)
            continue
        number = min(fitting, key=lambda number: (rooms[number], -touched[number]))
        bins[number].append(index)
        touched[number] = turn
    return [sorted(rows) for rows in bins]


@given(lengths=st.lists(st.integers(1, 100), max_size=60), spare=st.integers(0, 60))
def test_bins_are_those_of_looking_at_every_bin(lengths: list[int], spare: int) -> None:
    capacity = max(lengths, default=1) + spare
    bins = best_fit_decreasing(lengths, capacity)
    assert bins == best_fit_by_hand(lengths, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert max(totals(lengths, bins), default=0) <= capacity


def test_ties_follow_the_order_that_is_given() -> None:
    assert best_fit_decreasing([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert best_fit_decreasing([5, 5, 5, 5], 10, order=[3, 0, 2, 1]) == [[0, 3], [1, 2]]
    with pytest.raises(ValueError, match="11 tokens does not fit into 10"):
        best_fit_decreasing([3, 11], 10)


Groups = list[tuple[int, list[int]]]
"""Prompt length, and completion lengths, of each group."""


def flat(drawn: Groups) -> tuple[list[int], list[int], list[int]]:
    """Lengths, prompt lengths and group ids."""
    rows = [(prompt + each, prompt, 7 * number) for number, (prompt, made) in enumerate(drawn) for each in made]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def slowest(bins: list[list[int]], ranks: int, *lists: list[int]) -> int:
    totals = [PackedCost(*lists).tokens(rows) for rows in bins]
    return sum(max(totals[first : first + ranks]) for first in range(0, len(totals), ranks))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=8)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_row_once_and_never_slower_than_dealing_rows_one_by_one(drawn: Groups, ranks: int, steps: int) -> None:
    lengths, prompts, groups = flat(drawn)
    bins = ranks * steps
    if len(lengths) < bins:
        return
    dealt = PackedCost(lengths, prompts, groups).split(range(len(lengths)), bins, ranks=ranks)
    assert len(dealt) == bins
    assert all(rows and rows == sorted(rows) for rows in dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    one_by_one = [sorted(rows) for rows in split_by_tokens(lengths, bins)]
    assert slowest(dealt, ranks, lengths, prompts, groups) <= slowest(one_by_one, ranks, lengths, prompts, groups)


def test_whole_groups_stay_together_where_one_rank_computes_them() -> None:
    lengths, prompts, groups = flat([(100, [10, 20, 30, 40]) for _ in range(6)])
    dealt = PackedCost(lengths, prompts, groups).split(range(24), 3, ranks=1)
    assert sorted(len({groups[row] for row in rows}) for rows in dealt) == [2, 2, 2]
    computed = sum(PackedCost(lengths, prompts, groups).tokens(rows) for rows in dealt)
    assert computed == 6 * (100 + 100)


def test_groups_are_split_where_a_rank_would_wait_for_another() -> None:
    """One prompt of eight long answers beside a short one: two ranks share the work on the long ones."""
    lengths, prompts, groups = flat([(5, [100] * 8), (5, [1])])
    dealt = PackedCost(lengths, prompts, groups).split(range(9), 2, ranks=2)
    assert slowest(dealt, 2, lengths, prompts, groups) <= 5 + 400 + 6


def test_rows_may_be_any_part_of_the_iteration() -> None:
    lengths, prompts, groups = flat([(4, [3, 3]), (4, [3, 3]), (4, [3, 3])])
    assert PackedCost(lengths, prompts, groups).split([2, 3, 4, 5], 2, ranks=1) == [[2, 3], [4, 5]]
