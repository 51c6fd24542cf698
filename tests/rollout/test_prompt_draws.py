"""In which order iterations that are sampled side by side draw their prompts, on one rank and on several.

That runs lose no prompt and train on the same ones whatever ends first, is in
``tests/callbacks/rollout/test_async_rollouts_properties.py``.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Prompt, Sample
from rlhfkit.datamodules.prompts.curriculum import BySuccess
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.rank_store import LocalStore, RankLog
from rlhfkit.rollout.background import BackgroundRollouts
from rlhfkit.rollout.collector import CollectedGroups, collect_groups
from rlhfkit.rollout.prompt_draws import OverlappingDraws
from rollout.test_collector_ranks import AnyOrder, ThreadStore


def draws(ahead: int, timeout: float = 30.0) -> OverlappingDraws:
    order = PromptOrder(100, shuffle=False)
    return OverlappingDraws(
        lambda: IterationQueue(order, lambda row: Prompt(row, [5]), PromptCursor()),
        first=4,
        ahead=ahead,
        timeout=timeout,
    )


def rows(prompts: list[Prompt]) -> list[int]:
    return [prompt.index for prompt in prompts]


def test_first_prompts_of_all_come_before_further_ones_of_the_oldest() -> None:
    both = draws(ahead=1)
    old, new = both.queue(4), both.queue(5)
    assert rows(old.take(3)) == [0, 1, 2]
    assert rows(old.take(1)) == [6]  # 3, 4, 5 are kept for the next iteration, whether it has begun or not
    assert rows(new.take(3)) == [3, 4, 5]
    old.requeue([Prompt(6, [5])])
    assert old.remaining == 96
    assert old.after["postponed"] == [3, 4, 5, 6]  # a run that is resumed here draws them again, and then goes on at 7
    assert old.after["offset"] == 7
    both.finish(4)
    assert rows(new.take(1)) == [9]  # the first prompts of iteration 6 are 6, 7 and 8


def test_a_draw_waits_for_earlier_iterations_and_names_them() -> None:
    both = draws(ahead=1, timeout=0.05)
    both.queue(4).take(2)
    new = both.queue(5)
    new.take(2)
    with pytest.raises(
        TimeoutError, match=r"iteration 5 has waited 0\.05 s to draw prompts, until iteration 4 has all"
    ):
        new.take(1)
    with pytest.raises(TimeoutError, match="iteration 6 has waited"):
        both.queue(6).take(2)


def test_the_failure_of_an_iteration_ends_the_draws_that_depend_on_it() -> None:
    both = draws(ahead=1)
    both.queue(4).take(2)
    new = both.queue(5)
    new.take(2)
    threading.Timer(0.05, both.fail, [ValueError("no engine")]).start()
    with pytest.raises(ValueError, match="no engine"):
        new.take(1)


def test_without_any_ahead_iterations_draw_in_turn() -> None:
    turns = draws(ahead=0)
    old = turns.queue(4)
    assert rows(old.take(2)) + rows(old.take(1)) == [0, 1, 2]
    assert old.after["postponed"] == []
    turns.finish(4)
    assert rows(turns.queue(5).take(2)) == [3, 4]


def play(world_size: int, ahead: int, seed: int, wanted: int, teaches: set[int], ranked: bool) -> list[tuple[Any, ...]]:
    """What ranks that are threads train on in four iterations, of which ``ahead`` + 1 are sampled side by side."""
    curriculum = BySuccess(low=0.4, high=0.9, keep=0.3) if ranked else None
    order = PromptOrder(11, seed=2, curriculum=curriculum)
    shared, lock, found = LocalStore(), threading.Lock(), dict[int, list[Any]]()

    def rank_of(rank: int) -> None:
        store = ThreadStore(rank, world_size, shared, lock)
        jobs: BackgroundRollouts[CollectedGroups] = BackgroundRollouts()
        draws = OverlappingDraws(
            lambda: IterationQueue(order, lambda row: Prompt(row, [5]), PromptCursor()),
            first=0,
            ahead=ahead,
            timeout=30,
        )

        def job(iteration: int, log: RankLog, let_next_start: Callable[[], None]) -> CollectedGroups:
            def score(samples: list[Sample]) -> None:
                for sample in samples:
                    sample.reward = 1.0 / (1 + sample.prompt.index % 3)

            def collect() -> CollectedGroups:
                stream = AnyOrder(100 * seed + 10 * iteration + rank, True)
                queue, known = draws.queue(iteration), draws.remaining
                assert known == 11
                return collect_groups(
                    wanted,
                    queue,
                    stream,
                    score=score,
                    keep=lambda group: group[0].prompt.index in teaches,
                    log=log,
                    on_drawn=let_next_start,
                    most=8,
                )

            collected = log.run(collect, timeout=30, waiting_for="samples")
            draws.finish(iteration)
            return collected

        made = []
        for iteration in range(4 + ahead):
            if iteration < 4:
                jobs.submit(iteration, partial(job, iteration, store.log("rollouts", keep=8)))
            if iteration >= ahead:  # trained on in order, while later ones are sampled
                one = jobs.result(iteration - ahead, 30)
                made.append((one.prompts, one.accepted, one.sampled, one.after))
        jobs.close()
        found[rank] = made

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(world_size))
    assert all(each == found[0] for each in found.values())
    return found[0]


@settings(deadline=None, max_examples=25)
@given(
    ahead=st.integers(0, 2),
    seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    wanted=st.integers(1, 3),
    teaches=st.sets(st.integers(0, 10), min_size=4),
    ranked=st.booleans(),
)
def test_iterations_side_by_side_are_the_same_on_one_two_and_three_ranks(
    ahead: int, seeds: tuple[int, int], wanted: int, teaches: set[int], ranked: bool
) -> None:
    """Under dynamic sampling, and a curriculum that goes by rewards, whatever ends first on whichever rank."""
    alone = play(1, ahead, seeds[0], wanted, teaches, ranked)
    for world_size in (2, 3):
        assert play(world_size, ahead, seeds[1], wanted, teaches, ranked) == alone
