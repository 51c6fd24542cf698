"""Groups of an iteration, for any engine, any selection and any order in which groups finish."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data import Prompt, Sample
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.rollout.collector import CollectedGroups, GroupSelection

TOTAL = 12


class AnyOrder:
    """A stream whose groups end in any order, several at a time; notes what it was asked and what it has given."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.submitted: list[int] = []
        self.open: list[Prompt] = []
        self.given: list[int] = []
        self.most_open = 0
        self.closed = False

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        self.submitted += [prompt.index for prompt in prompts]
        self.open += prompts
        self.most_open = max(self.most_open, len(self.open))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        assert most >= 1
        ended = self.chance.sample(self.open, min(self.chance.randint(1, 3), most, len(self.open)))
        self.open = [prompt for prompt in self.open if prompt not in ended]
        self.given += [prompt.index for prompt in ended]
        return [[Sample(prompt, place, [5], [0.0], [0], "stop", reward=1.0) for place in (0, 1)] for prompt in ended]

    def close(self) -> None:
        self.closed = True


def prompt(row: int) -> Prompt:
    return Prompt(row, [5])


def fill(after: dict, seed: int, wanted: int, spare: int, teaches: set[int], most: int | None) -> CollectedGroups:
    stream, order = AnyOrder(random.Random(seed)), PromptOrder(TOTAL, seed=2)
    queue = IterationQueue(order, prompt, PromptCursor.from_state_dict(after))
    filled = GroupSelection(
        wanted, queue, stream, keep=lambda group: group[0].prompt.index in teaches, most=most, spare=spare
    ).run()
    groups = [group[0].prompt.index for group in filled.groups]
    good = [index for index in stream.given if index in teaches]
    assert stream.closed
    assert len(stream.submitted) == len(set(stream.submitted)) <= (most or TOTAL)
    assert stream.most_open <= wanted + spare
    assert len(groups) == wanted == len(set(groups))
    assert Counter(groups[: filled.accepted]) == Counter(good)  # every accepted group is trained on, now
    assert groups[: filled.accepted] == [index for index in stream.submitted if index in good]  # in their order
    if filled.accepted < wanted:  # nothing that may be sampled is left
        assert len(stream.submitted) == min(TOTAL, most or TOTAL)
        assert not stream.open
    begun = [index for index in stream.submitted if index not in stream.given]
    assert (filled.sampled, filled.requeued) == (len(stream.given), len(begun))
    again = IterationQueue(order, prompt, PromptCursor.from_state_dict(filled.after))
    if begun:
        assert [each.index for each in again.take(len(begun))] == begun  # in order, first of all
    return filled


START = {"pass": 0, "offset": 0, "postponed": []}
ITERATIONS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=8)


@given(iterations=ITERATIONS, teaches=st.sets(st.integers(0, TOTAL - 1)), limit=st.none() | st.integers(5, TOTAL))
def test_nothing_is_lost_doubled_or_out_of_order(
    iterations: list[tuple[int, int, int]], teaches: set[int], limit: int | None
) -> None:
    after, used = START, Counter[int]()
    for seed, wanted, spare in iterations:
        before = PromptCursor.from_state_dict(after)
        filled = fill(after, seed, wanted, spare, teaches, limit)
        after = filled.after
        # Over all passes: what was sampled to its end, and what is put off, is every row that was passed.
        now = PromptCursor.from_state_dict(after)
        passed = Counter(dict.fromkeys(range(TOTAL), now.number - before.number)) + Counter(before.postponed)
        passed.update(PromptOrder(TOTAL, seed=2)._permutation(now.number)[: now.offset])
        passed.subtract(PromptOrder(TOTAL, seed=2)._permutation(before.number)[: before.offset])
        judged = passed - Counter(now.postponed)
        assert judged.total() == filled.sampled
        assert set(judged) >= {group[0].prompt.index for group in filled.groups}
        used += judged
    number, offset, postponed, *_ = PromptCursor.from_state_dict(after)
    whole = Counter(dict.fromkeys(range(TOTAL), number))
    whole.update(PromptOrder(TOTAL, seed=2)._permutation(number)[:offset])
    assert used + Counter(postponed) == whole


@given(seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2, unique=True), teaches=st.sets(st.integers(0, 11)))
def test_without_spare_groups_the_order_of_ending_does_not_matter(seeds: list[int], teaches: set[int]) -> None:
    """So a run with dynamic sampling is the same on every engine, and after every resume."""
    first, second = (fill(START, seed, 4, 0, teaches, 9) for seed in seeds)
    assert [group[0].prompt.index for group in first.groups] == [group[0].prompt.index for group in second.groups]
    assert first.after == second.after


def test_a_stream_that_ends_too_early_is_an_error() -> None:
    class Forgetful(AnyOrder):
        def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
            return super().collect(1) if len(self.open) > 1 else []

    stream = Forgetful(random.Random(0))
    queue = IterationQueue(PromptOrder(TOTAL), prompt, PromptCursor())
    with pytest.raises(RuntimeError, match="4 groups were asked for, and the engine ended with 3 of them"):
        GroupSelection(4, queue, stream).run()
    assert stream.closed


def test_more_groups_than_prompts_are_refused() -> None:
    queue = IterationQueue(PromptOrder(3), prompt, PromptCursor())
    with pytest.raises(ValueError, match="iteration of 4 groups needs as many different prompts, and there are 3"):
        GroupSelection(4, queue, AnyOrder(random.Random(0))).run()
