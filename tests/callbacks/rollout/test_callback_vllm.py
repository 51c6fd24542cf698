"""Iterations with real vLLM engines: weights arrive after each policy step, and training is as with LocalEngine.

Samples that go on with new weights: ``rollout/vllm/test_images.py`` (vLLM) and ``test_async_rollouts.py`` (whole runs).
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rl_runs import Iterations, PlainGRPO, digits, fit_run

from rlhfkit import Ahead, Invariants, LoRA, RolloutCallback, SamplingSpec, VLLMPool
from rlhfkit.callbacks import Probe
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts import Correction
from rlhfkit.rollout import HealthPolicy
from rlhfkit.strategies import RLHFDeepSpeedStrategy


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


class Keep(Iterations):
    """Checks each iteration; in the end each rank writes all samples, their versions and the weights."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__()
        self.folder, self.model = folder, model

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        rollouts = RolloutCallback.of(trainer)
        assert get_world_size() == 2
        assert len(rollouts.samples) == 16  # of 8 groups of 4
        assert rollouts.part(Probe).difference <= 1e-5  # type: ignore[union-attr]
        assert max(version for one in self.samples[-1] for version in one.versions.tolist()) <= self.began[-1]
        whole = sum(parameter.nbytes for parameter in load_causal_lm(str(self.model)).parameters())
        assert rollouts.sync_metrics["rollout/sync_bytes"] < 0.2 * whole

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        versions = [one.versions.tolist() for samples in self.samples for one in samples]
        (self.folder / f"rank_{get_rank()}.json").write_text(json.dumps([self.tokens, versions, self.weights]))


def fit(folder: Path, model: Path) -> None:
    """Two iterations in flight, on ranks that are Ray actors; each writes a report into the folder."""
    rollouts = RolloutCallback(
        digits,
        # It is started for this policy, so that it gets the adapter alone.
        engine=VLLMPool(kv_cache_gib=0.1, max_model_len=64, health=HealthPolicy(probe_timeout=60)),
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        parts=[Ahead(1, in_flight=True)],
    )
    fit_run(
        folder,
        model=model,
        rollouts=rollouts,
        callbacks=[Invariants(), Keep(folder, model)],
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "parts": [Correction("tis").plain()], "lora": LoRA(rank=4)},
        data_arguments={"micro_batch_size": 16},
        accumulate_grad_batches=1,
        strategy=RLHFDeepSpeedStrategy(3, launcher="ray", resources_per_rank={"CPU": 0.25}),
        devices=2,
        use_distributed_sampler=False,
    )


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.distributed
def test_two_zero3_ranks_on_ray_ask_one_engine_for_their_share(
    vllm_model: Path, ray_session: None, tmp_path: Path
) -> None:
    """In flight, with an adapter that is sent alone; ranks of a script publish in ``rollout/vllm/test_pool.py``."""
    fit(tmp_path, vllm_model)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
