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
    """A stream whose groups end in any order, after a while; it notes what it was asked and what it has given.

    The first token of a sample is the iteration of its seeds.
    """

    def __init__(self, seed: int, streams: bool = True, slowest: float = 0.002) -> None:
        self.chance = random.Random(seed)
        self.streams, self.slowest = streams, slowest
        self.submitted: list[int] = []
        self.iterations: list[int] = []
        self.resumed: dict[int, list[Sample]] = {}
        self.open: dict[int, tuple[Prompt, int]] = {}
        self.given: list[int] = []
        self.most_open, self.closed = 0, False

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        self.submitted += [prompt.index for prompt in prompts]
        self.iterations += [iteration or 0] * len(prompts)
        self.open |= {prompt.index: (prompt, iteration or 0) for prompt in prompts}
        self.most_open = max(self.most_open, len(self.open))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        assert most >= 1
        time.sleep(self.chance.random() * self.slowest)
        count = min(self.chance.randint(1, 3), most) if self.streams else len(self.open)
        ended = self.chance.sample([*self.open], min(count, len(self.open)))
        self.given += ended
        return [[self.sample(*one, place, "stop") for place in (0, 1)] for one in map(self.open.pop, ended)]

    def sample(self, prompt: Prompt, iteration: int, place: int, ending: Any) -> Sample:
        """One more token than what it continues."""
        begun = {sample.sample_index: sample for sample in self.resumed.get(prompt.index, ())}
        count = 1 + (begun[place].num_tokens if place in begun else 0)
        return Sample(prompt, place, [iteration] * count, [0.0] * count, [0] * count, ending, reward=1.0)

    def resume(self, groups: Sequence[list[Sample]], *, iteration: int | None = None) -> None:
        self.resumed |= {group[0].prompt.index: group for group in groups}
        self.submit([group[0].prompt for group in groups])

    def cut(self) -> list[list[Sample]]:
        """Of some groups one sample was begun, of others none."""
        return [[self.sample(*one, 1, "abort")] for index, one in self.open.items() if index % 3]

    def close(self) -> None:
        self.closed = True


def queue_at(after: dict[str, Any], total: int = TOTAL) -> IterationQueue:
    """The prompts from a place in the passes on."""
    return IterationQueue(numbered(total, seed=2), PromptCursor.from_state_dict(after))


def on_ranks(world_size: int, work: Callable[[ThreadStore], Any]) -> list[Any]:
    """Run something on ranks that are threads; an exception is its result."""
    shared, lock, results = LocalStore(), threading.Lock(), [None] * world_size

    def rank_of(rank: int) -> None:
        try:
            results[rank] = work(ThreadStore(rank, world_size, shared, lock))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def collecting(world_size: int, step: Callable[[RankLog], Any]) -> list[Any]:
    """:func:`on_ranks` for a step that has a log."""

    def work(store: ThreadStore) -> Any:
        log = store.log("rollouts")
        return log.run(lambda: step(log), timeout=30, waiting_for="samples")

    return on_ranks(world_size, work)


def collect(
    after: dict[str, Any], seed: int, log: RankLog, *, wanted: int, teaches: set[int], streams: bool, **arguments: Any
) -> tuple[CollectedGroups, AnyOrder]:
    stream, queue = AnyOrder(seed * 10 + log.store.rank, streams), queue_at(after)
    arguments |= {"keep": lambda group: group[0].prompt.index in teaches, "log": log}
    return GroupSelection(wanted, queue, stream, **arguments).run(), stream


START = {"pass": 0, "offset": 0, "postponed": []}


def decided(after: dict[str, Any]) -> Counter[int]:
    """All rows that the passes have gone over, but for those that are put off."""
    cursor = PromptCursor.from_state_dict(after)
    rows = Counter(dict.fromkeys(range(TOTAL), cursor.number))
    rows.update(numbered(TOTAL, seed=2)._permutation(cursor.number)[: cursor.offset])
    rows.subtract(cursor.postponed)
    return rows


@settings(deadline=None, max_examples=100)
@given(
    iterations=st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=4),
    world_size=st.integers(1, 3),
    spare=st.integers(0, 4),
    teaches=st.sets(st.integers(0, TOTAL - 1)),
    limit=st.none() | st.integers(5, TOTAL),
    rounds=st.booleans(),
    partial=st.booleans(),
)
def test_nothing_is_lost_doubled_or_out_of_order_on_any_number_of_ranks_which_score_together_within_a_limit(
    iterations: list[tuple[int, int]],
    world_size: int,
    spare: int,
    teaches: set[int],
    limit: int | None,
    rounds: bool,
    partial: bool,
) -> None:
    dropped = [Dropped() for _ in range(world_size)]
    tokens: dict[int, int] = {}  # what a group that was begun has, by its prompt
    after: dict[str, Any] = START
    spare = 0 if rounds else spare
    for seed, wanted in iterations:
        options = {"wanted": wanted, "teaches": teaches, "spare": spare, "rounds": rounds, "streams": not rounds}
        options["most"] = limit
        everyone = threading.Barrier(world_size, timeout=30)  # also those that have no group in a round
        together = {"score_together": lambda samples: everyone.wait()} if rounds else {}  # noqa: B023

        def step(log: RankLog) -> tuple[CollectedGroups, AnyOrder]:
            begun = dropped[log.store.rank] if partial and spare else None  # noqa: B023
            return collect(after, seed, log, begun=begun, **options, **together)  # noqa: B023

        results = collecting(world_size, step)
        assert not any(isinstance(result, Exception) for result in results), results
        found, streams = zip(*results, strict=True)
        first = found[0]
        for other in found[1:]:  # all ranks decide the same
            assert (other.prompts, other.after, other.accepted) == (first.prompts, first.after, first.accepted)
            assert (other.sampled, other.requeued, other.reward) == (first.sampled, first.requeued, first.reward)
            assert other.continued == first.continued
        own = [group[0].prompt.index for each in found for group in each.groups]
        assert sorted(own) == sorted(first.prompts)
        assert len(first.prompts) == wanted == len(set(first.prompts))

        drawn = [prompt.index for prompt in queue_at(after).take(first.sampled + first.requeued)]
        assert sorted(index for stream in streams for index in stream.submitted) == sorted(drawn)  # each by one rank
        assert len(drawn) <= (limit or TOTAL)
        assert sum(stream.most_open for stream in streams) <= world_size * (wanted + spare)
        assert all(stream.closed for stream in streams)
        accepted = first.prompts[: first.accepted]
        assert accepted == [index for index in drawn if index in accepted]  # in the order of the prompts
        judged = decided(first.after) - decided(after)
        assert judged.total() == first.sampled
        assert set(first.prompts) <= set(judged) <= set(drawn)
        begun = [index for index in drawn if index not in judged]
        assert len(begun) == first.requeued
        if begun:
            assert [each.index for each in queue_at(first.after).take(len(begun))] == begun  # in order, first of all
        if first.accepted < wanted:  # nothing that may be sampled is left
            assert len(judged) == len(drawn) == min(TOTAL, limit or TOTAL)
        assert set(accepted) == set(judged) & teaches  # every accepted group is trained on, now
        if world_size == 1:
            assert sorted(streams[0].given) == sorted(judged)

        resumed = {index: group for stream in streams for index, group in stream.resumed.items()}
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
        if not spare:  # the groups, and where the next iteration begins, are those of one rank
            ((alone, _),) = collecting(1, lambda log: collect(after, seed, log, **options))  # noqa: B023
            assert (alone.prompts, alone.after) == (first.prompts, first.after)
        after = first.after


def test_a_stream_that_ends_too_early_is_an_error_on_all_ranks() -> None:
    class Forgetful(AnyOrder):
        def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
            return super().collect(1) if len(self.open) > 1 else []

    def step(log: RankLog) -> CollectedGroups:
        return GroupSelection(6, queue_at(START), Forgetful(log.store.rank), log=log).run()

    for error in (*collecting(2, step), *collecting(1, step)):
        assert re.search("groups were asked for, and the engine ended with", str(error))


def test_more_groups_than_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="iteration of 4 groups needs as many different prompts, and there are 3"):
        GroupSelection(4, queue_at(START, total=3), AnyOrder(0)).run()
