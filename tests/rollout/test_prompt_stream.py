"""One stream of prompts: what is in flight ahead, and that it changes neither prompts nor seeds, on any ranks.

That whole runs lose no prompt and train on the same ones whatever ends first, is in
``tests/callbacks/rollout/test_async_rollouts_properties.py``.
"""

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from datamodules.prompts.drawing import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Prompt, Sample
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.datamodules.prompts.table import TablePrompts
from rlhfkit.rank_store import LocalStore
from rlhfkit.rollout.collector import GroupSelection, flatten
from rlhfkit.rollout.prompt_stream import PromptStream
from rollout.test_collector import ThreadStore


class Engine:
    """Groups that end in any order and know the iteration of their seeds; notes how many are in flight."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.open: list[tuple[Prompt, int]] = []
        self.sent: list[tuple[int, int]] = []
        self.closed = False

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        assert iteration is not None
        self.open += [(prompt, iteration) for prompt in prompts]
        self.sent += [(prompt.index, iteration) for prompt in prompts]

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        ended = self.chance.sample(self.open, min(self.chance.randint(1, 3), most, len(self.open)))
        self.open = [one for one in self.open if one not in ended]
        return [[Sample(prompt, place, [seed], [0.0], [0], "stop") for place in (0, 1)] for prompt, seed in ended]

    def close(self) -> None:
        self.open, self.closed = [], True


def queue_of(order: TablePrompts) -> IterationQueue:
    return IterationQueue(order, PromptCursor())


def stream_of(total: int = 100, position: int = 0) -> tuple[PromptStream, TablePrompts, Engine]:
    order = numbered(total, shuffle=False)
    stream = PromptStream(lambda: queue_of(order), wanted=3, rank=0, world_size=1, position=position)
    return stream, order, Engine(0)


def rows(prompts: Sequence[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_what_takes_the_place_of_a_rejected_group_was_started_before() -> None:
    stream, order, engine = stream_of()
    stream.begin(0, queue_of(order), lambda: engine)
    stream.newest = 1
    stream.submit(stream.take(3))
    stream.collect(9)
    assert [index for index, _ in engine.sent] == [0, 1, 2, 3, 4, 5]
    assert [iteration for _, iteration in engine.sent] == [0, 0, 0, 1, 1, 1]
    further = stream.take(2)
    assert rows(further) == [3, 4]
    stream.submit(further)
    assert len(engine.sent) == 6  # they are in flight
    stream.collect(9)
    assert [index for index, _ in engine.sent[6:]] == [6, 7]  # again as many as the next iteration needs
    assert stream.after["offset"] == 5  # a run that is resumed here draws 5, 6 and 7 next
    stream.drop()
    assert engine.closed


def test_another_order_of_prompts_than_the_one_that_was_started_is_an_error() -> None:
    stream, order, engine = stream_of()
    stream.begin(0, queue_of(order), lambda: engine)
    stream.newest = 1
    stream.submit(stream.take(3))
    stream.collect(9)
    stream.begin(1, queue_of(order), lambda: engine)
    with pytest.raises(RuntimeError, match="prompt 3 was started ahead, and prompt 0 was drawn"):
        stream.take(3)


Played = list[tuple[list[int], int, int, dict[str, Any], dict[int, int]]]


def play(world_size: int, ahead: int, seed: int, wanted: int, teaches: set[int]) -> Played:
    """What ranks that are threads train on in four iterations, while groups of ``ahead`` further ones are in flight."""
    order = numbered(11, seed=2)
    shared, lock, found = LocalStore(), threading.Lock(), dict[int, Any]()
    seeds: list[dict[int, int]] = [{} for _ in range(4)]

    def rank_of(rank: int) -> None:
        store, engine = ThreadStore(rank, world_size, shared, lock), Engine(100 * seed + rank)
        stream = PromptStream(lambda: queue_of(order), wanted=wanted, rank=rank, world_size=world_size, position=0)
        place, made = {"pass": 0, "offset": 0, "postponed": []}, []
        for iteration in range(4):
            log = store.log("rollouts", keep=8)
            queue = queue_of(order)
            queue.cursor = PromptCursor.from_state_dict(place)
            stream.begin(iteration, queue, lambda: engine)
            stream.newest = min(iteration + ahead, 3)

            def score(samples: list[Sample], iteration: int = iteration) -> None:
                for sample in samples:
                    sample.reward = 1.0 / (1 + sample.prompt.index % 3)
                    seeds[iteration][sample.prompt.index] = int(sample.token_ids[0])

            one = log.run(
                lambda log=log: GroupSelection(
                    wanted,
                    stream,
                    stream,
                    score=score,
                    keep=lambda group: group[0].prompt.index in teaches,
                    log=log,
                    most=8,
                    position=stream.position,
                ).run(),
                timeout=30,
                waiting_for="samples",
            )
            place = one.after
            assert len(flatten(one.groups)) == 2 * len(one.groups)
            made.append((one.prompts, one.accepted, one.sampled, one.after))
        assert not engine.open
        found[rank] = made

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(world_size))
    assert all(each == found[0] for each in found.values())
    return [(*one, used) for one, used in zip(found[0], seeds, strict=True)]


@settings(deadline=None, max_examples=25)
@given(
    ahead=st.integers(0, 2),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    wanted=st.integers(1, 3),
    teaches=st.sets(st.integers(0, 10), min_size=4),
)
def test_prompts_and_seeds_are_the_same_on_one_two_and_three_ranks_and_however_far_ahead(
    ahead: int, seeds: tuple[int, int], wanted: int, teaches: set[int]
) -> None:
    alone = play(1, 0, seeds[0], wanted, teaches)
    for world_size in (1, 2, 3):
        assert play(world_size, ahead, seeds[1], wanted, teaches) == alone
