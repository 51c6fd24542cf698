"""Oversampling in whole runs: the first groups are trained on, the prompts of the others come first in the next one.

Covers ``callbacks/rollout/parts/oversampling.py`` and ``rollout/collector.py``.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import SaveAt, digits, setup_run, weights

from rlhfkit import LocalEngine, Oversampling, RolloutCallback, SamplingSpec


class Watched(LocalEngine):
    """Keeps which prompts each iteration has begun with, and which were finished."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[list[int]] = []
        self.finished: list[list[int]] = []
        self.resumed: list[dict[int, Any]] = []

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> Any:
        stream = super().stream(sampling, iteration=iteration)
        begun: list[int] = []
        finished: list[int] = []
        self.begun.append(begun)
        self.finished.append(finished)
        submit, collect, resume = stream.submit, stream.collect, stream.resume

        def watched_resume(groups: Any, **arguments: Any) -> None:
            self.resumed.append({group[0].prompt.index: group for group in groups})
            resume(groups, **arguments)

        def watched_submit(prompts: Any, **arguments: Any) -> None:
            begun.extend(prompt.index for prompt in prompts)
            submit(prompts, **arguments)

        def watched_collect(most: int, **arguments: Any) -> Any:
            groups = collect(most, **arguments)
            finished.extend(group[0].prompt.index for group in groups)
            return groups

        stream.submit, stream.collect = watched_submit, watched_collect  # type: ignore[method-assign]
        stream.resume = watched_resume
        return stream


def run(
    folder: Path, *callbacks: L.Callback, ckpt_path: str | None = None, partial: bool = False
) -> tuple[Any, Any, Any, Watched]:
    engine = Watched()
    # A sixth of the tokens are stops, so that groups end at different times.
    sampling = SamplingSpec(group_size=4, max_new_tokens=48, stop_token_ids=tuple(range(60, 80)))
    rollouts = RolloutCallback(digits, engine=engine, sampling=sampling, parts=[Oversampling(0.5, continued=partial)])
    trainer, module, data, _ = setup_run(folder, rollouts=rollouts, callbacks=callbacks, max_epochs=4)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, data, engine


def test_prompts_of_dropped_groups_come_first_and_a_resumed_run_is_the_straight_one(tmp_path: Path) -> None:
    trainer, module, data, engine = run(tmp_path, SaveAt(tmp_path / "saved.ckpt"))
    assert [len(begun) for begun in engine.begun] == [12] * 4
    assert [len(finished) for finished in engine.finished] == [8] * 4
    for begun, finished, following in zip(engine.begun, engine.finished, engine.begun[1:], strict=False):
        assert following[:4] == [index for index in begun if index not in finished]
    assert any(
        begun[:8] != sorted(finished, key=begun.index)
        for begun, finished in zip(engine.begun, engine.finished, strict=True)
    )
    used = Counter(index for finished in engine.finished for index in finished)
    assert max(used.values()) == 1  # 32 of 40 prompts, none twice
    state = data.state_dict()
    assert len(state["postponed"]) == 4
    assert len(used) + 4 == state["offset"]
    assert trainer.callback_metrics["rollout/dropped_fraction"] == pytest.approx(1 / 3)

    _, resumed, _, rest = run(tmp_path, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert rest.begun == engine.begun[2:]
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, weights(module)[name])


def test_dropped_groups_are_continued_also_by_a_resumed_run(tmp_path: Path) -> None:
    samples: list[list[Any]] = []

    class Keep(L.Callback):
        def on_train_epoch_start(self, trainer: Any, *arguments: Any) -> None:
            samples.append([])

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            samples[-1] = RolloutCallback.of(trainer).samples

    saves = [SaveAt(tmp_path / f"{batch}.ckpt", batch) for batch in (6, 8)]  # inside the second iteration, at its end
    trainer, module, _, engine = run(tmp_path, Keep(), *saves, partial=True)
    assert len(engine.resumed) == 3
    assert trainer.callback_metrics["rollout/continued_fraction"] > 0.1
    mixed = 0
    for resumed, trained in zip(engine.resumed, samples[1:], strict=True):
        found = {(sample.prompt.index, sample.sample_index): sample for sample in trained}
        for begun in (sample for group in resumed.values() for sample in group):
            sample = found.get((begun.prompt.index, begun.sample_index))
            if sample is not None:
                count = begun.num_tokens
                assert sample.token_ids.tolist()[:count] == begun.token_ids.tolist()
                assert sample.logprobs.tolist()[:count] == begun.logprobs.tolist()
                assert sample.versions.tolist()[:count] == begun.versions.tolist()
                mixed += len(set(sample.versions.tolist())) > 1
    assert mixed > 3
    for batch in (6, 8):
        _, resumed, _, rest = run(tmp_path, ckpt_path=str(tmp_path / f"{batch}.ckpt"), partial=True)
        assert [list(each) for each in rest.resumed] == [list(each) for each in engine.resumed[1:]]
        for name, tensor in weights(resumed).items():
            assert torch.equal(tensor, weights(module)[name])
