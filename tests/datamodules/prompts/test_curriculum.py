"""Curricula: what they order and leave out, full iterations, and that stopping and staleness change nothing."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_runs import ahead, setup_run, weights

from rlhfkit import RolloutCallback, Sample, SamplingSpec
from rlhfkit.datamodules.prompts.curriculum import MAX_RECENT, ByColumn, BySuccess, Curriculum, PromptPass, PromptStats
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor
from rlhfkit.datamodules.prompts.table import TablePrompts

from .drawing import numbered

TOTAL = 9


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


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValueError, match="high must be a finite number"):
        BySuccess(low=1.0)


def prompts(**options: Any) -> TablePrompts:
    return numbered(TOTAL, first=100, **options)


def play(prompts: TablePrompts, cursor: PromptCursor, sizes: Sequence[int]) -> tuple[list[list[int]], PromptCursor]:
    """Rows of each iteration; the reward of a prompt is a function of itself and of how often it was sampled."""
    played = []
    for size in sizes:
        queue = IterationQueue(prompts, cursor)
        taken = queue.take(size)
        known = cursor.history or {}
        queue.record({each.index: [float((each.index + len(known)) % 3 == 0)] for each in taken})
        played.append([each.index - 100 for each in taken])
        cursor = PromptCursor.from_state_dict(json.loads(json.dumps(queue.after)))  # plain values, through any file
    return played, cursor


def some(share: int) -> Curriculum:
    """A curriculum that leaves out about one of ``share`` rows, others in each pass, and what is solved."""

    def order(one: PromptPass) -> list[int]:
        unsolved = [row for row in one.rows if row not in one.history or one.history[row].reward < 1]
        return [row for row in unsolved if (row * 7 + one.number * 3) % (share + 1)]

    return order


@given(st.lists(st.integers(1, TOTAL), max_size=15), st.integers(0, 3), st.integers(0, 15))
def test_iterations_are_always_full_and_resume_anywhere(sizes: list[int], share: int, stop: int) -> None:
    options: dict[str, Any] = {"seed": 2, "curriculum": some(share)}
    straight, end = play(prompts(**options), PromptCursor(), sizes)
    assert [len(set(rows)) for rows in straight] == sizes
    first, middle = play(prompts(**options), PromptCursor(), sizes[:stop])
    second, resumed_end = play(prompts(**options), middle, sizes[stop:])
    assert first + second == straight
    assert resumed_end == end


def test_a_pass_is_what_the_curriculum_says() -> None:
    rows, _ = play(prompts(curriculum=lambda one: sorted(one.rows)[: 6 - one.number]), PromptCursor(), [3] * 5)
    assert list(itertools.chain(*rows))[:15] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_too_few_prompts_for_an_iteration_are_filled_up_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows, _ = play(prompts(curriculum=lambda one: [4, 2]), PromptCursor(), [5])
    assert rows[0][:2] == [4, 2]
    assert len(set(rows[0])) == 5
    assert "has 2 rows, too few for an iteration" in caplog.text


def test_rows_may_be_numpys_and_are_plain_in_a_checkpoint() -> None:
    reversed_rows = prompts(curriculum=lambda one: np.argsort([-row for row in range(TOTAL)]))
    rows, cursor = reversed_rows.take(3, PromptCursor())
    assert rows == [8, 7, 6]
    assert PromptCursor.from_state_dict(json.loads(json.dumps(cursor.state_dict()))) == cursor


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has returned 9 for pass 0: it must return rows .* 0 to 8"):
        prompts(curriculum=lambda one: [0, 9]).take(1, PromptCursor())


# -- in real runs ------------------------------------------------------------------------------------------------------


def by_prompt(samples: Sequence[Sample]) -> list[float]:
    """Every third prompt is solved always, every third never, the others half of the time."""
    return [(1.0, 0.0, sample.sample_index % 2)[sample.prompt.index % 3] for sample in samples]


class Watch(L.Callback):
    """Prompts of each iteration; saves one checkpoint after a micro-batch."""

    def __init__(self, path: Path | None = None, after: int = 0) -> None:
        self.path, self.after, self.count = path, after, 0
        self.prompts: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        samples = next(each for each in trainer.callbacks if isinstance(each, RolloutCallback)).samples
        self.prompts.append(list(dict.fromkeys(sample.prompt.index for sample in samples)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if self.count == self.after:
            trainer.save_checkpoint(self.path)


def by_progress(one: PromptPass) -> list[int]:
    """Backwards, without the prompts of the latest groups that were solved; it keeps nothing itself."""
    solved = {group.row for group in one.recent[-24:] if group.reward == 1.0}
    return [row for row in reversed(one.rows) if row not in solved]


Run = Callable[..., tuple[Any, Watch]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Nine iterations of 8 of 40 prompts: two passes at least."""

    def fit(curriculum: Any, staleness: int = 0, watch: Watch | None = None, **arguments: Any) -> tuple[Any, Watch]:
        watch = watch or Watch()
        trainer, module, data, _ = setup_run(
            tmp_path,
            data_arguments={"curriculum": curriculum},
            rollouts=RolloutCallback(
                by_prompt, sampling=SamplingSpec(group_size=4, max_new_tokens=2), parts=ahead(staleness)
            ),
            callbacks=[watch],
            max_epochs=9,
        )
        trainer.fit(module, data, **arguments)
        return weights(module), watch

    return fit


@pytest.mark.parametrize("curriculum", [BySuccess(keep=0.1), by_progress], ids=["history", "recent"])
def test_rewards_decide_what_comes_next_however_far_sampling_is_ahead(run: Run, curriculum: Any) -> None:
    _, turns = run(curriculum)
    _, ahead = run(curriculum, staleness=2)
    # In on_train_epoch_start the samples are those of the iteration before.
    assert turns.prompts[1:] == ahead.prompts[1:]
    second_pass = Counter(index % 3 for rows in turns.prompts[6:] for index in rows)
    if curriculum is by_progress:
        assert second_pass[0] < min(second_pass[1], second_pass[2])
    else:
        assert second_pass[2] > 5 * max(second_pass[0], second_pass[1], 1)


@pytest.mark.parametrize(
    ("after", "curriculum"), [(22, BySuccess(keep=0.1)), (24, by_progress)], ids=["inside an iteration", "at its end"]
)
def test_a_resumed_run_goes_on_bitwise(run: Run, tmp_path: Path, after: int, curriculum: Any) -> None:
    straight, watch = run(curriculum, watch=Watch(tmp_path / "saved.ckpt", after))
    resumed, rest = run(curriculum, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert rest.prompts[-1] == watch.prompts[-1]
    assert all(torch.equal(tensor, straight[name]) for name, tensor in resumed.items())


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
