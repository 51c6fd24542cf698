"""Iterations with real vLLM engines: weights arrive after each policy step, and training is as with LocalEngine."""

import copy
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, fit_run, samples_of_all_ranks
from tiny_models import completion_logprobs

from callbacks.rollout import vllm_ranks
from rlhfkit import Ahead, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks import Probe
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts import Correction


@pytest.mark.smoke
@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_follows_the_policy_update_by_update(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    probes: list[float] = []
    mismatch: list[float] = []
    rewards: list[float] = []
    versions: list[tuple[int, set[int]]] = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            versions.append((trainer.global_step, set(batch.versions[batch.action_mask].tolist())))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rewards.append(float(rollouts.experience.rewards.mean()))  # type: ignore[union-attr]
            probes.append(rollouts.part(Probe).difference)
            mismatch.append(float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"]))

    rollouts = RolloutCallback(digits, engine=vllm_pool, sampling=SamplingSpec(group_size=8, max_new_tokens=8))
    fit_run(
        tmp_path, model=vllm_model, rollouts=rollouts, callbacks=[Keep()], module_arguments={"lr": 5e-3},
        data_arguments={"rollout_batch_size": 16, "micro_batch_size": 128}, accumulate_grad_batches=1, max_epochs=12,
    )  # fmt: skip
    assert versions == [(step, {step}) for step in range(12)]
    assert max(probes) <= 1e-5
    assert max(mismatch) <= 1e-5
    # 128 samples an iteration; a random policy has about 0.1 with a standard error of about 0.01.
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1


@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_takes_new_weights_in_the_middle_of_samples(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    """Publishing does not wait; each token's log-prob is the trainer's under the weights of that token's version."""
    policies: dict[int, torch.nn.Module] = {}
    samples: list[Sample] = []

    class Keep(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            policies[trainer.global_step] = copy.deepcopy(pl_module.policy).eval()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            samples.extend(samples_of_all_ranks(rollouts))
            # Whether a step ends while the engine samples is a matter of half a second: train until one did.
            trainer.should_stop = any(len(set(sample.versions.tolist())) > 1 for sample in samples)

    sampling = SamplingSpec(group_size=4, max_new_tokens=300, min_new_tokens=300)
    rollouts = RolloutCallback(digits, engine=vllm_pool, sampling=sampling, parts=[Ahead(1, in_flight=True)])
    fit_run(
        tmp_path, model=vllm_model, rollouts=rollouts, callbacks=[Keep()], max_epochs=50, accumulate_grad_batches=1,
        module_arguments={"lr": 5e-3, "parts": [Correction("tis")]},
        data_arguments={"rollout_batch_size": 2, "micro_batch_size": 8},
    )  # fmt: skip

    mixed = [sample for sample in samples if len(set(sample.versions.tolist())) > 1]
    assert mixed
    assert all(sample.versions.tolist() == sorted(sample.versions.tolist()) for sample in samples)
    assert {version for sample in mixed for version in sample.versions.tolist()} <= set(policies)
    worst, elsewhere = 0.0, 0.0
    for sample in mixed:
        for version in set(sample.versions.tolist()):
            difference = completion_logprobs(policies[version], sample) - torch.tensor(sample.logprobs)
            own = torch.tensor(sample.versions) == version
            worst = max(worst, float(difference[own].abs().max()))
            elsewhere = max(elsewhere, float(difference[~own].abs().max()))
    assert worst <= 2e-5
    assert elsewhere > 1e-2  # the policies differ: another version's log-probs would have been noticed


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.distributed
def test_two_zero3_ranks_on_ray_ask_one_engine_for_their_share(
    vllm_model: Path, ray_session: None, tmp_path: Path
) -> None:
    """In flight, with an adapter that is sent alone; ranks of a script publish in ``rollout/vllm/test_pool.py``."""
    vllm_ranks.fit(tmp_path, vllm_model)
    first, second = (json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in (0, 1))
    assert (first["ranks"], second["ranks"]) == ([0, 2], [1, 2])
    assert first["own"] == second["own"] == [16] * 2  # of 8 groups of 4
    assert max(first["probes"]) <= 1e-5
    for field in ("tokens", "versions", "weights"):
        assert first[field] == second[field], field
    whole = sum(parameter.nbytes for parameter in load_causal_lm(str(vllm_model)).parameters())
    assert first["sync_bytes"] < 0.2 * whole
    assert all(ages[0][-1] <= number for number, ages in enumerate(first["versions"]))
