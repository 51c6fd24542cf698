"""Oversampling in whole runs: the first groups are trained on, the others continued in the next iteration.

Covers ``callbacks/rollout/parts/oversampling.py`` and ``rollout/collector.py``. That prompts of dropped groups come
first without being continued is in ``rollout/test_collector.py``, for resumed runs in ``datamodules/prompts``.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import Iterations, SaveAt, digits, fit_run, weights

from rlhfkit import Invariants, LocalEngine, Oversampling, Prompt, RolloutCallback, Sample, SamplingSpec


class Watched(LocalEngine):
    """Keeps which groups each iteration has continued, and how many prompts it has begun with."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed: list[dict[int, list[Sample]]] = []
        self.begun: list[int] = []

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> Any:
        stream = super().stream(sampling, iteration=iteration)
        submit, resume = stream.submit, stream.resume
        self.resumed.append({})
        self.begun.append(0)

        def watched_resume(groups: Any, **arguments: Any) -> None:
            self.resumed[-1] = {group[0].prompt.index: group for group in groups}
            self.begun[-1] += len(groups)
            resume(groups, **arguments)

        def watched_submit(prompts: list[Prompt], **arguments: Any) -> None:
            self.begun[-1] += len(prompts)
            submit(prompts, **arguments)

        stream.submit, stream.resume = watched_submit, watched_resume  # type: ignore[method-assign]
        return stream


def run(folder: Path, *callbacks: L.Callback, resume: str | None = None) -> tuple[Any, Any, Watched]:
    """Four iterations of 8 of 40 prompts."""
    engine = Watched()
    # A sixth of the tokens are stops, so that groups end at different times.
    sampling = SamplingSpec(group_size=4, max_new_tokens=48, stop_token_ids=tuple(range(60, 80)))
    rollouts = RolloutCallback(digits, engine=engine, sampling=sampling, parts=[Oversampling(0.5, continued=True)])
    trainer, module, _ = fit_run(folder, rollouts=rollouts, callbacks=callbacks, max_epochs=4, resume=resume)
    return trainer, module, engine


def test_dropped_groups_are_continued_also_by_a_resumed_run(tmp_path: Path) -> None:
    saves = [SaveAt(tmp_path / f"{batch}.ckpt", batch) for batch in (6, 8)]  # inside the second iteration, at its end
    seen, checks = Iterations(), Invariants()
    trainer, module, engine = run(tmp_path, seen, checks, *saves)
    assert engine.begun == [12] * 4
    assert [len(each) for each in seen.prompts] == [8] * 4
    used = {index for prompts in seen.prompts for index in prompts}
    assert len(used) == 32  # none twice
    state = trainer.datamodule.state_dict()
    assert len(state["postponed"]) == 4
    assert len(used) + 4 == state["offset"]
    assert trainer.callback_metrics["rollout/dropped_fraction"] == pytest.approx(1 / 3)
    assert trainer.callback_metrics["rollout/continued_fraction"] > 0.1
    assert trainer.callback_metrics["rollout/staleness"] > 0
    assert checks.checked == 4

    mixed = 0
    for resumed, trained in zip(engine.resumed[1:], seen.samples[1:], strict=True):
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
        _, again, rest = run(tmp_path, resume=str(tmp_path / f"{batch}.ckpt"))
        assert [list(each) for each in rest.resumed] == [list(each) for each in engine.resumed[2:]]
        for name, tensor in weights(again).items():
            assert torch.equal(tensor, weights(module)[name])
