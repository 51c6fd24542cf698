"""Curricula: what they order and leave out; stopping and staleness change nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhfkit.datamodules.prompts.curriculum import MAX_RECENT, ByColumn, BySuccess, PromptPass, PromptStats
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor

from .drawing import Watch, numbered, watched


def one_pass(number: int = 0, rewards: dict[int, float] | None = None) -> PromptPass:
    values = {"level": [2, 0, 1, 0, 2, 1, 0, 1, 2]}
    history = {row: PromptStats(4, reward, reward) for row, reward in (rewards or {}).items()}
    return PromptPass(number, [8, 3, 5, 0, 6, 1, 7, 2, 4], history, values.__getitem__)


def test_a_column_orders_a_pass_and_ties_stay_shuffled() -> None:
    assert ByColumn("level")(one_pass()) == [3, 6, 1, 5, 7, 2, 8, 0, 4]
    assert ByColumn("level", descending=True)(one_pass()) == [8, 0, 4, 5, 7, 2, 3, 6, 1]
    assert ByColumn("level", passes=1)(one_pass(1)) == one_pass().rows


def test_success_leaves_out_what_teaches_nothing() -> None:
    rewards = {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.25, 4: 1.0}
    assert BySuccess(keep=0.0)(one_pass(3, rewards)) == [8, 3, 5, 6, 7, 2]
    assert BySuccess(keep=0.0, low=0.3, high=0.6)(one_pass(3, rewards)) == [8, 5, 6, 7, 2]
    assert BySuccess(keep=1.0)(one_pass(3, rewards)) == one_pass().rows
    kept = [len(BySuccess(keep=0.2)(one_pass(number, rewards))) - 6 for number in range(1000)]
    assert sum(kept) / 3000 == pytest.approx(0.2, abs=0.03)  # three of them; four standard errors
    with pytest.raises(ValueError, match="high must be a finite number"):
        BySuccess(low=1.0)


def test_a_pass_is_what_the_curriculum_says() -> None:
    """Its rows may be numpy's."""
    prompts, cursor, drawn = numbered(9, curriculum=lambda one: np.sort(one.rows)[: 6 - one.number]), PromptCursor(), []
    for _ in range(5):
        rows, cursor = prompts.take(3, cursor)
        drawn += rows
    assert drawn == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert PromptCursor.from_state_dict(json.loads(json.dumps(cursor.state_dict()))) == cursor
    with pytest.raises(ValueError, match=r"has returned 9 for pass 0: it must return rows .* 0 to 8"):
        numbered(9, curriculum=lambda one: [0, 9]).take(1, PromptCursor())


def test_too_few_prompts_for_an_iteration_are_filled_up_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = numbered(9, curriculum=lambda one: [4, 2]).take(5, PromptCursor())
    assert rows[:2] == [4, 2]
    assert len(set(rows)) == 5
    assert "has 2 rows, too few for an iteration" in caplog.text


def by_progress(one: PromptPass) -> list[int]:
    """Backwards, without the prompts of the latest groups that were solved; it keeps nothing itself."""
    solved = {group.row for group in one.recent[-24:] if group.reward == 1.0}
    return [row for row in reversed(one.rows) if row not in solved]


@pytest.mark.parametrize(("curriculum", "after"), [(BySuccess(keep=0.1), 22), (by_progress, 24)])
def test_rewards_decide_what_comes_next_when_ahead_too_and_a_resumed_run_goes_on_bitwise(
    tmp_path: Path, curriculum: Any, after: int
) -> None:
    """Two passes; stopped inside of an iteration or at its end."""
    saved, watch, rest, early = tmp_path / "saved.ckpt", *(Watch() for _ in range(3))
    watch.saved = {after: saved}
    straight, _ = watched(tmp_path, watch, curriculum=curriculum)
    resumed, _ = watched(tmp_path, rest, resume=saved, curriculum=curriculum)
    assert rest.prompts[-1] == watch.prompts[-1]
    assert all(torch.equal(tensor, straight[name]) for name, tensor in resumed.items())
    watched(tmp_path, early, staleness=2, curriculum=curriculum)
    assert early.prompts == watch.prompts
    second_pass = Counter(index % 3 for rows in watch.prompts[5:] for index in rows)
    if curriculum is by_progress:
        assert second_pass[0] < min(second_pass[1], second_pass[2])
    else:
        assert second_pass[2] > 5 * max(second_pass[0], second_pass[1], 1)


def test_statistics_of_a_prompt_have_the_latest_group_and_all_samples() -> None:
    once = PromptStats.after(None, [1.0, 0.0])
    twice = PromptStats.after(once, [1.0, 1.0, 0.0, 1.0])
    assert once == (2, 0.5, 0.5)
    assert twice == (6, 0.75, pytest.approx(4 / 6))
    saved = PromptCursor(history={3: twice}).state_dict()
    assert PromptCursor.from_state_dict(saved).history == {3: twice}


def test_the_latest_groups_are_kept_in_order_with_the_position_and_are_bounded() -> None:
    queue = IterationQueue(numbered(2000, shuffle=False, curriculum=lambda one: one.rows), PromptCursor())
    queue.take(1500)
    queue.record({index: [1.0, index % 2] for index in range(1500)} | {7: []})
    cursor = PromptCursor.from_state_dict(queue.after)
    assert cursor.recent == queue.cursor.recent
    assert [group.row for group in cursor.recent] == list(range(1500))[-MAX_RECENT:]
    assert cursor.recent[-1] == (1499, 1.0)
