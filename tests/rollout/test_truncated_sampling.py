"""Truncated sampling (top-p and the like): log-probs stay comparable with the trainer's, or a correction is refused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, fit_run, setup_run
from tiny_models import completion_logprobs, local_engine

from rlhfkit import LocalEngine, Prompt, RolloutCallback, Sample, SamplingSpec, VLLMPool
from rlhfkit.losses import CORRECTION_PRESETS, dppo_loss, importance_weights
from rlhfkit.modules.parts import Correction

NUCLEUS = SamplingSpec(group_size=2, max_new_tokens=400, min_new_tokens=400, top_p=0.9)


class Weigh(L.Callback):
    """Weights of every correction in the first update, where engine and trainer hold the same weights."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.tokens = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            own = pl_module.policy_output(batch).logprobs
        self.tokens = max(self.tokens, int(batch.action_mask.sum(-1).max()))
        for name, arguments in CORRECTION_PRESETS.items():
            weights = importance_weights(own, batch.rollout_logprobs, batch.action_mask, **arguments).weights
            worst = float((weights - 1.0)[batch.action_mask].abs().max())
            self.worst[name] = max(self.worst.get(name, 0.0), worst)


def run(folder: Path, engine: Any, model: Path | None = None) -> tuple[Weigh, dict[str, float]]:
    """One iteration of one update with the strictest of the corrections."""
    weigh = Weigh()
    rollouts = RolloutCallback(digits, engine=engine, sampling=NUCLEUS)
    trainer, *_ = fit_run(
        folder, model=model, rollouts=rollouts, callbacks=[weigh], max_epochs=1, accumulate_grad_batches=1,
        module_arguments={"lr": 1e-6, "parts": [Correction("geo-mask")]}, data_arguments={"rollout_batch_size": 4},
    )  # fmt: skip
    return weigh, {name: float(value) for name, value in trainer.callback_metrics.items()}


def check(weigh: Weigh, metrics: dict[str, float]) -> None:
    """400 tokens of one policy: what is left of the weights of whole sequences is rounding."""
    assert weigh.tokens == 400
    assert weigh.worst.keys() == CORRECTION_PRESETS.keys()
    assert max(weigh.worst.values()) <= 2e-4, weigh.worst
    assert metrics["rollout_corr/logprob_abs_diff_mean"] <= 1e-5
    assert metrics["rollout_corr/masked_fraction"] == 0.0


def test_every_correction_weighs_1_where_the_policies_are_equal(tmp_path: Path) -> None:
    check(*run(tmp_path, LocalEngine()))


@pytest.mark.vllm
@pytest.mark.ray
def test_every_correction_weighs_1_with_vllm(vllm_pool: Any, vllm_model: Path, tmp_path: Path) -> None:
    check(*run(tmp_path, vllm_pool, vllm_model))


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"min_new_tokens": 20},
        {"temperature": 0.0, "min_new_tokens": 20},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        {"repetition_penalty": 1.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_whole_distribution(
    folder: Path, models: list[Any], arguments: dict[str, Any]
) -> None:
    model, engine = models[0], local_engine(folder)
    size = 1 if arguments.get("temperature") == 0 else 4
    spec = SamplingSpec(group_size=size, max_new_tokens=30, **arguments)
    for sample in engine.generate([Prompt(0, [7, 9, 30])], spec, iteration=0):
        expected = completion_logprobs(model, sample, spec.temperature or 1.0)
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=2e-5)


class OnlyTruncated(LocalEngine):
    """An engine that does not know log-probs before truncation."""

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        return not sampling.truncates

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        samples = super().generate(prompts, sampling, iteration=iteration)
        for sample in samples:
            sample.logprobs = [math.nan] * len(sample.logprobs)
        return samples


CORRECTED = {"parts": [Correction("tis").plain()]}


@pytest.mark.parametrize(
    ("engine", "sampling", "arguments"),
    [
        (OnlyTruncated(), SamplingSpec(group_size=2, max_new_tokens=4, top_p=0.9), CORRECTED),
        (OnlyTruncated(), SamplingSpec(group_size=2, max_new_tokens=4, top_p=0.9), {"policy_loss": dppo_loss}),
        (VLLMPool(), SamplingSpec(group_size=2, max_new_tokens=4, temperature=0.7, min_p=0.1), CORRECTED),
    ],
    ids=["an engine that cannot", "a policy loss", "vllm at another temperature"],
)
def test_logprobs_that_nobody_knows_are_refused_where_they_are_needed_before_anything_is_loaded(
    tmp_path: Path, engine: Any, sampling: SamplingSpec, arguments: dict[str, Any]
) -> None:
    rollouts = RolloutCallback(digits, engine=engine, sampling=sampling)
    trainer, module, data, _ = setup_run(tmp_path, module_arguments=arguments, rollouts=rollouts)
    with pytest.raises(ValueError, match=r"SamplingSpec\((temp|top_|min_).* before truncation, so that every weight"):
        trainer.fit(module, data)
    assert not hasattr(module, "policy")


def test_without_a_correction_they_are_not_needed_and_the_mismatch_is_not_known(tmp_path: Path) -> None:
    rollouts = RolloutCallback(
        digits, engine=OnlyTruncated(), sampling=SamplingSpec(group_size=4, max_new_tokens=4, top_p=0.9)
    )
    assert not rollouts.engine.configure_logprobs(rollouts.sampling)
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, max_epochs=1)
    assert math.isfinite(trainer.callback_metrics["loss"])
    assert math.isnan(trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"])


@torch.no_grad()
def test_penalties_follow_their_formula(folder: Path, models: list[Any]) -> None:
    spec = SamplingSpec(
        group_size=1, max_new_tokens=20, temperature=0.0,
        repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6,
    )  # fmt: skip
    prompts = [Prompt(0, [7, 9, 30]), Prompt(1, [11, 12])]
    for sample in local_engine(folder).generate(prompts, spec, iteration=0):
        before = sample.prompt.token_ids.tolist()
        for place, token in enumerate(sample.token_ids.tolist()):
            logits = models[0](input_ids=torch.tensor([before])).logits[0, -1].tolist()
            for seen in set(before):
                count = sample.token_ids.tolist()[:place].count(seen)
                logits[seen] = logits[seen] / 1.4 if logits[seen] > 0 else logits[seen] * 1.4
                logits[seen] -= 0.6 * count + 0.3 * (count > 0)
            assert token == max(range(len(logits)), key=logits.__getitem__)
            before.append(token)


@pytest.mark.parametrize("form", [{"regex": "[0-9]+"}, {"json_schema": {"type": "object"}}], ids=str)
def test_a_form_that_nothing_enforces_is_refused_before_anything_is_loaded(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    rollouts = RolloutCallback(
        digits, engine=LocalEngine(), sampling=SamplingSpec(group_size=2, max_new_tokens=8, **form)
    )
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts)
    with pytest.raises(ValueError, match="LocalEngine has no grammars, which SamplingSpec"):
        trainer.fit(module, data)
    assert not hasattr(module, "policy")
