"""Iterations with real vLLM engines: weights arrive after each policy step, and training is as with LocalEngine.

Samples that go on with new weights: ``rollout/vllm/test_images.py`` (vLLM) and ``test_async_rollouts.py`` (whole runs).
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rl_runs import Iterations, digits, fit_run

from callbacks.rollout import vllm_ranks
from rlhfkit import RolloutCallback, SamplingSpec
from rlhfkit.callbacks import Probe


@pytest.mark.smoke
@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_follows_the_policy_update_by_update(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    class Keep(Iterations):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            assert rollouts.part(Probe).difference <= 1e-5  # type: ignore[union-attr]
            assert float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"]) <= 1e-5

    seen = Keep()
    rollouts = RolloutCallback(digits, engine=vllm_pool, sampling=SamplingSpec(group_size=8, max_new_tokens=8))
    fit_run(
        tmp_path, model=vllm_model, rollouts=rollouts, callbacks=[seen], module_arguments={"lr": 5e-3},
        data_arguments={"rollout_batch_size": 16, "micro_batch_size": 128}, accumulate_grad_batches=1, max_epochs=12,
    )  # fmt: skip
    assert seen.began == list(range(12))
    for step, samples in enumerate(seen.samples):
        assert {version for one in samples for version in one.versions.tolist()} == {step}
    rewards = [fmean(one.reward or 0.0 for one in samples) for samples in seen.samples]
    # 128 samples an iteration; a random policy has about 0.1 with a standard error of about 0.01.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.distributed
def test_two_zero3_ranks_on_ray_ask_one_engine_for_their_share(
    vllm_model: Path, ray_session: None, tmp_path: Path
) -> None:
    """In flight, with an adapter that is sent alone; ranks of a script publish in ``rollout/vllm/test_pool.py``."""
    vllm_ranks.fit(tmp_path, vllm_model)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
