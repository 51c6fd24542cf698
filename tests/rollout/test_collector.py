"""Groups of an iteration in whatever order they finish: no prompt is lost or sampled twice, and all ranks decide alike.

Ranks are threads here, which share a store in memory; covers ``collector.py``, and ``partial_rollouts.py`` on ranks.
"""

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from datamodules.prompts.drawing import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Prompt, Sample
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.rank_store import LocalStore, RankLog
from rlhfkit.rollout.collector import CollectedGroups, GroupSelection
from rlhfkit.rollout.partial_rollouts import Dropped

TOTAL = 14


class ThreadStore(LocalStore):
    """The store of one rank among threads; ``shared`` has the logs of all."""

    def __init__(self, rank: int, world_size: int, shared: LocalStore, lock: threading.Lock) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self._shared, self._shared_lock = shared, lock

    def append(self, name: str, entry: Any) -> None:
        with self._shared_lock:
            self._shared.append(name, entry)

    def entries(self, name: str, first: int) -> list[Any]:
        with self._shared_lock:
            return list(self._shared.entries(name, first))

    def wait_for_readers(self, name: str) -> None:
        """Nobody ends here."""


class AnyOrder:
    """A stream whose groups end in any order, after a while; it notes what it was asked and what it has given."""

    def __init__(self, seed: int, streams: bool = True, slowest: float = 0.002) -> None:
        self.chance = random.Random(seed)
        self.streams, self.slowest = streams, slowest
        self.submitted: list[int] = []
        self.resumed: dict[int, list[Sample]] = {}
        self.open: list[Prompt] = []
        self.given: list[int] = []
        self.most_open, self.closed = 0, False

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        self.submitted += [prompt.index for prompt in prompts]
        self.open += prompts
        self.most_open = max(self.most_open, len(self.open))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        assert most >= 1
        time.sleep(self.chance.random() * self.slowest)
        count = min(self.chance.randint(1, 3), most) if self.streams else len(self.open)
        ended = self.chance.sample(self.open, min(count, len(self.open)))
        self.open = [prompt for prompt in self.open if prompt not in ended]
        self.given += [prompt.index for prompt in ended]
        return [[self.sample(prompt, place, "stop") for place in (0, 1)] for prompt in ended]

    def sample(self, prompt: Prompt, place: int, ending: Any) -> Sample:
        """One more token than what it continues."""
        begun = {sample.sample_index: sample for sample in self.resumed.get(prompt.index, ())}
        count = 1 + (begun[place].num_tokens if place in begun else 0)
        return Sample(prompt, place, [5] * count, [0.0] * count, [0] * count, ending, reward=1.0)

    def resume(self, groups: Sequence[list[Sample]], *, iteration: int | None = None) -> None:
        self.resumed |= {group[0].prompt.index: group for group in groups}
        self.submit([group[0].prompt for group in groups])

    def cut(self) -> list[list[Sample]]:
        """Of some groups one sample was begun, of others none."""
        return [[self.sample(prompt, 1, "abort")] for prompt in self.open if prompt.index % 3]

    def close(self) -> None:
        self.closed = True


def queue_at(after: dict[str, Any], total: int = TOTAL) -> IterationQueue:
    """The prompts from a place in the passes on."""
    return IterationQueue(numbered(total, seed=2), PromptCursor.from_state_dict(after))


def on_ranks(world_size: int, step: Callable[[RankLog], Any]) -> list[Any]:
    """Run a step on ranks that are threads; an exception is its result."""
    shared, lock, results = LocalStore(), threading.Lock(), [None] * world_size

    def rank_of(rank: int) -> None:
        log = ThreadStore(rank, world_size, shared, lock).log("rollouts")
        try:
            results[rank] = log.run(lambda: step(log), timeout=30, waiting_for="samples")
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def collect(after: dict[str, Any], seed: int, log: RankLog, **arguments: Any) -> tuple[CollectedGroups, AnyOrder]:
    stream = AnyOrder(seed * 10 + log.store.rank, arguments.pop("streams"))
    teaches = arguments.pop("teaches")
    found = GroupSelection(
        arguments.pop("wanted"),
        queue_at(after),
        stream,
        keep=lambda group: group[0].prompt.index in teaches,
        log=log,
        **arguments,
    ).run()
    return found, stream


START = {"pass": 0, "offset": 0, "postponed": []}


def fill(after: dict, seed: int, wanted: int, spare: int, teaches: set[int], most: int | None) -> CollectedGroups:
    stream = AnyOrder(seed, slowest=0.0)
    filled = GroupSelection(
        wanted, queue_at(after), stream, keep=lambda group: group[0].prompt.index in teaches, most=most, spare=spare
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
    if begun:
        assert [each.index for each in queue_at(filled.after).take(len(begun))] == begun  # in order, first of all
    return filled


@given(
    iterations=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=8),
    teaches=st.sets(st.integers(0, TOTAL - 1)),
    limit=st.none() | st.integers(5, TOTAL),
)
def test_nothing_is_lost_doubled_or_out_of_order_within_a_limit(
    iterations: list[tuple[int, int, int]], teaches: set[int], limit: int | None
) -> None:
    """On one rank. Of several and in rounds: the next test."""
    after, used = START, Counter[int]()
    for seed, wanted, spare in iterations:
        before = PromptCursor.from_state_dict(after)
        filled = fill(after, seed, wanted, spare, teaches, limit)
        after = filled.after
        # Over all passes: what was sampled to its end, and what is put off, is every row that was passed.
        now = PromptCursor.from_state_dict(after)
        passed = Counter(dict.fromkeys(range(TOTAL), now.number - before.number)) + Counter(before.postponed)
        passed.update(numbered(TOTAL, seed=2)._permutation(now.number)[: now.offset])
        passed.subtract(numbered(TOTAL, seed=2)._permutation(before.number)[: before.offset])
        judged = passed - Counter(now.postponed)
        assert judged.total() == filled.sampled
        assert set(judged) >= {group[0].prompt.index for group in filled.groups}
        used += judged
    number, offset, postponed, *_ = PromptCursor.from_state_dict(after)
    whole = Counter(dict.fromkeys(range(TOTAL), number))
    whole.update(numbered(TOTAL, seed=2)._permutation(number)[:offset])
    assert used + Counter(postponed) == whole


@settings(deadline=None, max_examples=60)
@given(
    iterations=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=4),
    world_size=st.integers(1, 3),
    spare=st.integers(0, 3),
    teaches=st.sets(st.integers(0, TOTAL - 1), min_size=2),
    rounds=st.booleans(),
    partial=st.booleans(),
)
def test_nothing_is_lost_or_doubled_on_any_number_of_ranks(
    iterations: list[tuple[int, int]], world_size: int, spare: int, teaches: set[int], rounds: bool, partial: bool
) -> None:
    dropped = [Dropped() for _ in range(world_size)]
    tokens: dict[int, int] = {}  # what a group that was begun has, by its prompt
    after: dict[str, Any] = START
    expected: dict[str, Any] = START
    spare = 0 if rounds else spare
    for seed, wanted in iterations:
        options = {"wanted": wanted, "teaches": teaches, "spare": spare, "rounds": rounds, "streams": not rounds}

        def step(log: RankLog) -> tuple[CollectedGroups, AnyOrder]:
            begun = dropped[log.store.rank] if partial and spare else None  # noqa: B023
            return collect(after, seed, log, begun=begun, **options)  # noqa: B023

        results = on_ranks(world_size, step)
        assert not any(isinstance(result, Exception) for result in results), results
        found = [collected for collected, _ in results]
        first = found[0]
        for other in found[1:]:  # all ranks decide the same
            assert (other.prompts, other.after, other.accepted) == (first.prompts, first.after, first.accepted)
            assert (other.sampled, other.requeued, other.reward) == (first.sampled, first.requeued, first.reward)
            assert other.continued == first.continued
        own = [[group[0].prompt.index for group in each.groups] for each in found]
        assert sorted(index for share in own for index in share) == sorted(first.prompts)
        assert len(first.prompts) == wanted == len(set(first.prompts))
        submitted = Counter(index for _, stream in results for index in stream.submitted)
        assert set(submitted.values()) == {1}  # no rank samples what another does
        resumed = {index: group for _, stream in results for index, group in stream.resumed.items()}
        assert {index: max(map(Sample.num_tokens.fget, group)) for index, group in resumed.items()} == tokens  # type: ignore[attr-defined]
        assert len(tokens) <= first.continued
        for group in (group for each in found for group in each.groups):  # each is longer by what was begun
            begun_with = tokens.get(group[0].prompt.index, 0)
            assert 1 <= max(sample.num_tokens for sample in group) <= 1 + begun_with
            assert group[1].num_tokens == 1 + begun_with
        tokens = {}
        dropped = [each.dropped or Dropped() for each in found]
        for rank, partials in enumerate(dropped):
            for group in partials.begun(Prompt(row, [5]) for row in range(TOTAL)):
                assert partials.ranks[group[0].prompt.index] == rank
                tokens[group[0].prompt.index] = max(sample.num_tokens for sample in group)
        again = queue_at(first.after)
        assert first.sampled + first.requeued == len(submitted)
        begun = [prompt.index for prompt in again.take(first.requeued)] if first.requeued else []
        assert set(begun) <= set(submitted)
        if not spare:  # the groups, and where the next iteration begins, are those of one rank
            ((alone, _),) = on_ranks(1, lambda log: collect(expected, seed, log, **options))  # noqa: B023
            assert (alone.prompts, alone.after) == (first.prompts, first.after)
            expected = alone.after
        after = first.after


def test_all_ranks_join_what_they_score_together() -> None:
    """Also those that have no group in a round."""
    barrier, rounds = threading.Barrier(3, timeout=30), [0, 0, 0]

    def step(log: RankLog) -> CollectedGroups:
        def together(samples: list[Sample]) -> None:
            barrier.wait()
            rounds[log.store.rank] += 1

        return collect(
            START, 1, log, wanted=4, teaches={3, 7, 9, 11}, rounds=True, streams=False, score_together=together
        )[0]

    results = on_ranks(3, step)
    assert not any(isinstance(result, Exception) for result in results), results
    assert sorted(results[0].prompts) == [3, 7, 9, 11]
    assert rounds[0] > 1
    assert len(set(rounds)) == 1


def test_an_error_on_one_rank_ends_the_collecting_of_all() -> None:
    def step(log: RankLog) -> CollectedGroups:
        def score(samples: list[Sample]) -> None:
            if log.store.rank == 2:
                raise ArithmeticError("no such reward")

        return collect(START, 1, log, wanted=5, teaches=set(range(TOTAL)), rounds=True, streams=False, score=score)[0]

    errors = on_ranks(3, step)
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError, ArithmeticError]
    assert str(errors[0]) == "rank 2 failed: ArithmeticError: no such reward"


def test_a_stream_that_ends_too_early_is_an_error_on_all_ranks() -> None:
    class Forgetful(AnyOrder):
        def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
            return super().collect(1) if len(self.open) > 1 else []

    def step(log: RankLog) -> CollectedGroups:
        return GroupSelection(6, queue_at(START), Forgetful(log.store.rank), log=log).run()

    for error in (*on_ranks(2, step), *on_ranks(1, step)):
        assert re.search("groups were asked for, and the engine ended with", str(error))


def test_more_groups_than_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="iteration of 4 groups needs as many different prompts, and there are 3"):
        GroupSelection(4, queue_at(START, total=3), AnyOrder(0)).run()
