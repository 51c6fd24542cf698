"""In which order iterations that are sampled side by side draw their prompts.

That runs lose no prompt and train on the same ones whatever ends first is in
``tests/callbacks/rollout/test_async_rollouts_properties.py``.
"""

import threading

import pytest

from rlhfkit.data import Prompt
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.rollout.prompt_draws import OverlappingDraws


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
