"""One stream of prompts: what is in flight ahead, and that it changes neither prompts nor seeds, on any ranks.

That whole runs lose no prompt and train on the same ones whatever ends first, is in
``tests/callbacks/rollout/test_async_rollouts_properties.py``.
"""

from typing import Any

import pytest
from datamodules.prompts.drawing import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Sample
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.datamodules.prompts.table import TablePrompts
from rlhfkit.rollout.collector import GroupSelection, flatten
from rlhfkit.rollout.prompt_stream import PromptStream
from rollout.test_collector import AnyOrder, ThreadStore, on_ranks


def queue_of(order: TablePrompts) -> IterationQueue:
    return IterationQueue(order, PromptCursor())


def test_what_takes_the_place_of_a_rejected_group_was_started_before_and_another_order_is_an_error() -> None:
    order, engine = numbered(100, shuffle=False), AnyOrder(0)
    stream = PromptStream(lambda: queue_of(order), wanted=3, rank=0, world_size=1, position=0)
    stream.begin(0, queue_of(order), lambda: engine)
    stream.newest = 1
    stream.submit(stream.take(3))
    stream.collect(9)
    assert engine.submitted == [0, 1, 2, 3, 4, 5]
    assert engine.iterations == [0, 0, 0, 1, 1, 1]
    further = stream.take(2)
    assert [prompt.index for prompt in further] == [3, 4]
    stream.submit(further)
    assert len(engine.submitted) == 6  # they are in flight
    stream.collect(9)
    assert engine.submitted[6:] == [6, 7]  # again as many as the next iteration needs
    assert stream.after["offset"] == 5  # a run that is resumed here draws 5, 6 and 7 next
    stream.begin(1, queue_of(order), lambda: engine)
    with pytest.raises(RuntimeError, match="prompt 5 was started ahead, and prompt 0 was drawn"):
        stream.take(3)
    stream.drop()
    assert engine.closed


Played = list[tuple[list[int], int, int, dict[str, Any], dict[int, int]]]


def play(world_size: int, ahead: int, seed: int, wanted: int, teaches: set[int]) -> Played:
    """What ranks that are threads train on in four iterations, while groups of ``ahead`` further ones are in flight."""
    order = numbered(11, seed=2)
    seeds: list[dict[int, int]] = [{} for _ in range(4)]

    def train(store: ThreadStore) -> list[Any]:
        rank, engine = store.rank, AnyOrder(100 * seed + store.rank, slowest=0.0)
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

            selection = GroupSelection(
                wanted,
                stream,
                stream,
                score=score,
                keep=lambda group: group[0].prompt.index in teaches,
                log=log,
                most=8,
                position=stream.position,
            )
            one = log.run(selection.run, timeout=30, waiting_for="samples")
            place = one.after
            assert len(flatten(one.groups)) == 2 * len(one.groups)
            made.append((one.prompts, one.accepted, one.sampled, one.after))
        assert not engine.open
        return made

    first, *others = on_ranks(world_size, train)
    assert all(each == first for each in others)
    return [(*one, used) for one, used in zip(first, seeds, strict=True)]


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
