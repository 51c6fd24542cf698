"""What a forward pass over rows costs, and properties of micro-batches of at most a number of tokens."""

import itertools
import random
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data.packing import MicroBatch, plan_micro_batches, split_by_tokens
from rlhfkit.data.token_cap import ForwardCost, PackedCost, PaddedCost, capped_batches, plan_capped_micro_batches

Groups = list[tuple[int, list[int]]]
"""Prompt length, and completion lengths, of each group."""

iterations = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=4, max_size=4)), min_size=2, max_size=10
)
"""Of four samples in each group."""


def forwards(drawn: Groups) -> tuple[PackedCost, PaddedCost]:
    rows = [(prompt + each, prompt, 7 * number) for number, (prompt, made) in enumerate(drawn) for each in made]
    lengths, prompts, groups = map(list, zip(*rows, strict=True))
    return PackedCost(lengths, prompts, groups), PaddedCost(lengths)


def computed(forward: ForwardCost, rows: list[int]) -> int:
    """Tokens of a forward pass, counted one by one."""
    assert isinstance(forward, PackedCost | PaddedCost)
    lengths = [forward.lengths[row] for row in rows]
    if isinstance(forward, PaddedCost):
        return max(lengths) * len(rows)
    prompts = {forward.groups[row]: forward.prompts[row] for row in rows}
    return sum(lengths) - sum(forward.prompts[row] for row in rows) + sum(prompts.values())


def per_update(plan: list[list[MicroBatch]], updates: int) -> list[list[MicroBatch]]:
    return [[batch for share in plan for batch in share if batch.update == update] for update in range(updates)]


@given(iterations, st.integers(1, 200), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.booleans())
def test_no_micro_batch_is_above_the_cap_and_all_ranks_and_updates_have_equally_many(
    drawn: Groups, cap: int, updates: int, ranks: int, packed: bool
) -> None:
    forward = forwards(drawn)[0 if packed else 1]
    count = 4 * len(drawn)
    if count % updates or count // updates < ranks:
        return
    plan = plan_capped_micro_batches(forward, count, max_tokens=cap, num_updates=updates, world_size=ranks)
    trained = [batch for share in plan for batch in share if batch.trained]
    assert sorted(row for batch in trained for row in batch.rows) == list(range(count))
    assert all(len(batch.rows) == 1 or computed(forward, batch.rows) <= cap for batch in trained)
    steps = {tuple(batch.update for batch in share) for share in plan}
    each = len(plan[0]) // updates
    assert steps == {tuple(update for update in range(updates) for _ in range(each))}
    for update, batches in enumerate(per_update(plan, updates)):
        size = count // updates
        rows = sorted(row for batch in batches if batch.trained for row in batch.rows)
        assert rows == list(range(update * size, (update + 1) * size))
    for share in plan:
        for batch in share:
            if not batch.trained:  # only where there are too few rows, and of this rank's own
                assert count // updates < each * ranks
                own = [other.rows for other in share if other.trained and other.update == batch.update]
                assert len(batch.rows) == 1
                assert batch.rows[0] in itertools.chain(*own)


@given(
    iterations,
    st.integers(1, 200),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from(["packed", "padded", "without a cap"]),
)
def test_ranks_that_share_micro_batches_have_the_rows_of_one_that_does_not(
    drawn: Groups, cap: int, updates: int, data: int, together: int, kind: str
) -> None:
    """The same micro-batches, and a prompt is computed as often: no more tokens in all."""
    count = 4 * len(drawn)
    packed, padded = forwards(drawn)
    forward: ForwardCost = padded if kind == "padded" else packed
    if kind == "without a cap":
        accumulate = 1 + (count // updates >= 2 * data)
        plan = partial(plan_micro_batches, packed.lengths, groups=packed.groups, accumulate=accumulate)
    else:
        plan = partial(plan_capped_micro_batches, forward, count, max_tokens=cap)
    alone = plan(num_updates=updates, world_size=data)
    shared = plan(num_updates=updates, world_size=data * together, ranks_per_forward=together)
    for number, own in enumerate(alone):
        members = shared[number * together : (number + 1) * together]
        for batch, *parts in zip(own, *members, strict=True):
            assert {part.update for part in parts} == {batch.update}
            assert all(part.trained == bool(part.rows) for part in parts)
            rows = sorted(row for part in parts for row in part.rows)
            assert rows == (batch.rows if batch.trained else [])
            tokens = [computed(forward, part.rows) for part in parts if part.rows]
            if batch.trained:
                assert sum(tokens) <= computed(forward, batch.rows)


@given(iterations, st.integers(60, 400), st.booleans())
def test_there_are_at_most_a_few_micro_batches_more_than_their_tokens_need(
    drawn: Groups, cap: int, packed: bool
) -> None:
    forward, rows = forwards(drawn)[0 if packed else 1], range(1, 4 * len(drawn))
    batches = capped_batches(forward, rows, cap)
    assert sorted(itertools.chain(*batches)) == list(rows)
    assert all(len(batch) == 1 or computed(forward, batch) <= cap for batch in batches)
    tokens = sum(computed(forward, batch) for batch in batches)
    # Two bins that are half empty would be one; padding wastes less than what one bin holds for each halving of length.
    assert len(batches) <= 2 * tokens / cap + 1 + (0 if packed else 8)


def test_fewest_micro_batches_of_padded_rows() -> None:
    lengths = [8, 8, 4, 4, 4, 4, 2, 2, 2, 2]
    plan = plan_capped_micro_batches(PaddedCost(lengths), 10, max_tokens=16, num_updates=1, world_size=1)
    assert [batch.rows for batch in plan[0]] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_prompt_counts_once_where_its_samples_are_together() -> None:
    packed, padded = forwards([(100, [10, 10, 10, 10])] * 4)
    together = plan_capped_micro_batches(packed, 16, max_tokens=140, num_updates=1, world_size=1)
    assert [batch.rows for batch in together[0]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(plan_capped_micro_batches(padded, 16, max_tokens=140, num_updates=1, world_size=1)[0]) == 16


def test_a_sequence_longer_than_the_cap_is_a_micro_batch_of_its_own_that_runs_first() -> None:
    for forward in forwards([(5, [300, 10, 10, 10]), (5, [10, 10, 10, 10])]):
        plan = plan_capped_micro_batches(forward, 8, max_tokens=60, num_updates=1, world_size=2)
        assert plan[0][0].rows == [0]


def slowest(forward: PackedCost, bins: list[list[int]], ranks: int) -> int:
    totals = [forward.tokens(rows) for rows in bins]
    return sum(max(totals[first : first + ranks]) for first in range(0, len(totals), ranks))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=8)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_every_row_once_and_never_slower_than_dealing_rows_one_by_one(drawn: Groups, ranks: int, steps: int) -> None:
    forward, _ = forwards(drawn)
    bins = ranks * steps
    if len(forward.lengths) < bins:
        return
    dealt = forward.split(range(len(forward.lengths)), bins, ranks=ranks)
    assert len(dealt) == bins
    assert all(rows and rows == sorted(rows) for rows in dealt)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(forward.lengths)))
    one_by_one = [sorted(rows) for rows in split_by_tokens(forward.lengths, bins)]
    assert slowest(forward, dealt, ranks) <= slowest(forward, one_by_one, ranks)


def test_whole_groups_stay_together_where_one_rank_computes_them() -> None:
    forward, _ = forwards([(100, [10, 20, 30, 40]) for _ in range(6)])
    dealt = forward.split(range(24), 3, ranks=1)
    assert sorted(len({forward.groups[row] for row in rows}) for rows in dealt) == [2, 2, 2]
    assert sum(map(forward.tokens, dealt)) == 6 * (100 + 100)


@pytest.fixture(scope="module")
def large() -> Groups:
    """16,384 samples."""
    generator = random.Random(0)
    return [
        (generator.randint(50, 400), [min(int(generator.lognormvariate(7.5, 0.9)) + 1, 16_384) for _ in range(16)])
        for _ in range(1024)
    ]


def test_a_full_iteration_with_a_cap_is_planned_and_fills_its_micro_batches(large: Groups) -> None:
    for forward in forwards(large):
        plan = plan_capped_micro_batches(forward, 16_384, max_tokens=32_768, num_updates=4, world_size=64)
        tokens = [forward.tokens(batch.rows) for share in plan for batch in share]
        assert max(tokens) <= 32_768
        assert sum(tokens) / (len(tokens) * 32_768) > 0.75


def test_a_full_iteration_without_a_cap_is_planned_in_a_moment(large: Groups) -> None:
    """16 updates of 256 micro-batches took 38 s when each merge of partitions wrote out every bin."""
    forward, _ = forwards(large)
    start = time.process_time()
    split = partial(forward.split, ranks=64)
    plan = plan_micro_batches(forward.lengths, num_updates=16, accumulate=4, world_size=64, split=split)
    assert time.process_time() - start < 2  # 0.15 s
    assert sorted(row for share in plan for batch in share for row in batch.rows) == list(range(16_384))
