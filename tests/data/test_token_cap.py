"""Properties of micro-batches of at most a number of tokens."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data.packing import MicroBatch
from rlhfkit.data.token_cap import ForwardCost, PackedCost, PaddedCost, capped_batches, plan_capped_micro_batches

iterations = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=4, max_size=4)), min_size=2, max_size=10
)
"""Prompt length, and completion lengths of four samples, of each group."""


def forwards(drawn: list[tuple[int, list[int]]]) -> tuple[PackedCost, PaddedCost]:
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
    drawn: list[tuple[int, list[int]]], cap: int, updates: int, ranks: int, packed: bool
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


@given(iterations, st.integers(1, 200), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(2, 4), st.booleans())
def test_ranks_that_share_micro_batches_have_the_rows_of_one_that_does_not(
    drawn: list[tuple[int, list[int]]], cap: int, updates: int, data: int, together: int, packed: bool
) -> None:
    """The same micro-batches, and a prompt is computed as often: no more tokens in all."""
    forward, count = forwards(drawn)[0 if packed else 1], 4 * len(drawn)
    sizes = {"max_tokens": cap, "num_updates": updates}
    alone = plan_capped_micro_batches(forward, count, world_size=data, **sizes)
    shared = plan_capped_micro_batches(forward, count, world_size=data * together, ranks_per_forward=together, **sizes)
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
    drawn: list[tuple[int, list[int]]], cap: int, packed: bool
) -> None:
    forward = forwards(drawn)[0 if packed else 1]
    count = 4 * len(drawn)
    plan = plan_capped_micro_batches(forward, count, max_tokens=cap, num_updates=1, world_size=1)
    tokens = sum(computed(forward, batch.rows) for batch in plan[0])
    # Two bins that are half empty would be one; padding wastes less than what one bin holds for each halving of length.
    assert len(plan[0]) <= 2 * tokens / cap + 1 + (0 if packed else 8)


def test_fewest_micro_batches_of_padded_rows() -> None:
    lengths = [8, 8, 4, 4, 4, 4, 2, 2, 2, 2]
    plan = plan_capped_micro_batches(PaddedCost(lengths), 10, max_tokens=16, num_updates=1, world_size=1)
    assert [batch.rows for batch in plan[0]] == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_prompt_counts_once_where_its_samples_are_together() -> None:
    packed, padded = forwards([(100, [10, 10, 10, 10])] * 4)
    together = plan_capped_micro_batches(packed, 16, max_tokens=140, num_updates=1, world_size=1)
    assert [batch.rows for batch in together[0]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(plan_capped_micro_batches(padded, 16, max_tokens=140, num_updates=1, world_size=1)[0]) == 16


def test_a_sequence_longer_than_the_cap_is_a_micro_batch_of_its_own() -> None:
    for forward in forwards([(5, [300, 10, 10, 10]), (5, [10, 10, 10, 10])]):
        plan = plan_capped_micro_batches(forward, 8, max_tokens=60, num_updates=1, world_size=2)
        rows = [batch.rows for share in plan for batch in share]
        assert [0] in rows
        assert plan[0][0].rows == [0]  # it runs first


@given(iterations, st.integers(1, 200), st.booleans())
def test_batches_within_a_cap_have_every_row_once(drawn: list[tuple[int, list[int]]], cap: int, packed: bool) -> None:
    forward, rows = forwards(drawn)[0 if packed else 1], range(1, 4 * len(drawn))
    batches = capped_batches(forward, rows, cap)
    assert sorted(itertools.chain(*batches)) == list(rows)
    assert all(len(batch) == 1 or computed(forward, batch) <= cap for batch in batches)


def test_a_full_iteration_is_planned_in_a_moment() -> None:
    generator = random.Random(0)
    drawn = [
        (generator.randint(50, 400), [min(int(generator.lognormvariate(7.5, 0.9)) + 1, 16_384) for _ in range(16)])
        for _ in range(1024)
    ]
    rows = [(prompt + each, prompt, number) for number, (prompt, made) in enumerate(drawn) for each in made]
    lengths, prompts, groups = map(list, zip(*rows, strict=True))
    for forward in (PackedCost(lengths, prompts, groups), PaddedCost(lengths)):
        plan = plan_capped_micro_batches(forward, len(rows), max_tokens=32_768, num_updates=4, world_size=64)
        tokens = [forward.tokens(batch.rows) for share in plan for batch in share]
        assert max(tokens) <= 32_768
        assert sum(tokens) / (len(tokens) * 32_768) > 0.75


def test_updates_that_do_not_fit_say_why() -> None:
    padded = PaddedCost([1] * 8)
    with pytest.raises(ValueError, match="3 updates do not divide 8 sequences"):
        plan_capped_micro_batches(padded, 8, max_tokens=9, num_updates=3, world_size=1)
    with pytest.raises(ValueError, match="each of 4 updates has 2 of 8 sequences, fewer than world_size 3"):
        plan_capped_micro_batches(padded, 8, max_tokens=9, num_updates=4, world_size=3)
