"""Dynamic sampling in whole runs: training sees only groups with different rewards, synchronous or asynchronous."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rl_runs import Iterations, SaveAt, fit_run, only_odd, weights

from rlhfkit import DynamicSampling, Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.parts.dynamic_sampling import has_signal


def group(rewards: Sequence[float | None]) -> list[Sample]:
    return [Sample(Prompt(0, [5]), place, [7], [0.0], [0], "stop", reward=one) for place, one in enumerate(rewards)]


def test_signal_is_a_difference_between_rewards_parts_or_values_of_a_function_that_are_there() -> None:
    assert has_signal(group([1.0, 0.5]))
    assert not any(map(has_signal, (group([1.0, 1.0]), group([1.0, None]), group([None, None]))))
    samples = group([1.0, 0.9, None])
    for sample, right in zip(samples, [1.0, 1.0, math.nan], strict=True):
        sample.reward_parts = {"right": right, "length": sample.reward or math.nan}
    assert has_signal(samples)
    assert not has_signal(samples, "right")
    assert has_signal(samples, "length")
    assert has_signal(samples, lambda sample: sample.sample_index)
    assert not has_signal(samples, lambda sample: None)
    with pytest.raises(ValueError, match=r"by='wrong'.*: no reward part is called that; the parts are length, right"):
        has_signal(samples, "wrong")
    assert DynamicSampling(keep=lambda samples: True).accepts(group([1.0, 1.0]))


def run(folder: Path, *callbacks: L.Callback, resume: Path | None = None) -> tuple[Any, Any]:
    """Trainer and module after three iterations."""
    sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    rollouts = RolloutCallback(only_odd, sampling=sampling, parts=[DynamicSampling()])
    return fit_run(folder, rollouts=rollouts, callbacks=callbacks, max_epochs=3, resume=resume)[:2]


def test_training_sees_only_groups_with_signal_and_resumes_bitwise(tmp_path: Path) -> None:
    saved, seen = tmp_path / "saved.ckpt", Iterations()
    trainer, module = run(tmp_path, seen, SaveAt(saved))
    assert all(index % 2 for prompts in seen.prompts for index in prompts)
    assert [len(prompts) for prompts in seen.prompts] == [8, 8, 8]
    assert len({index for prompts in seen.prompts[:2] for index in prompts}) == 16  # no prompt twice in a pass
    assert 0.2 < trainer.callback_metrics["rollout/accepted_fraction"] < 0.8
    assert trainer.callback_metrics["rollout/zero_advantage_fraction"] == 0.0
    _, resumed = run(tmp_path, resume=saved)
    for name, tensor in weights(module).items():
        assert (weights(resumed)[name] == tensor).all()


def test_an_iteration_without_enough_signal_is_filled_up_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = RolloutCallback(
        lambda samples: [1.0] * len(samples),
        sampling=SamplingSpec(group_size=4, max_new_tokens=4),
        parts=[DynamicSampling(max_rounds=2)],
    )
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, max_epochs=2)
    assert "accepted only 0 of the 8 groups that are needed, of 16 that were sampled" in caplog.text
    alarms = [one for one in caplog.messages if "rollout/zero_advantage_fraction is 1: almost all samples" in one]
    assert len(alarms) == 1
    assert trainer.callback_metrics["rollout/accepted_fraction"] == 0.0
