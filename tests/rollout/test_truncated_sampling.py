"""Truncated sampling (top-p and the like): log-probs stay comparable with the trainer's, or a correction is refused."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run, setup_run
from tiny_models import completion_logprobs, local_engine

from rlhfkit import LocalEngine, Prompt, RolloutCallback, Sample, SamplingSpec, VLLMPool
from rlhfkit.losses import dppo_loss
from rlhfkit.modules.parts import Correction


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments",
    [
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


UNKNOWN = r"SamplingSpec\((temp|top_|min_).* before truncation, so that every weight"


@pytest.mark.parametrize(
    ("engine", "sampling", "arguments", "says"),
    [
        (OnlyTruncated(), {"top_p": 0.9}, CORRECTED, UNKNOWN),
        (OnlyTruncated(), {"top_p": 0.9}, {"policy_loss": dppo_loss}, UNKNOWN),
        (VLLMPool(), {"temperature": 0.7, "min_p": 0.1}, CORRECTED, UNKNOWN),
        (LocalEngine(), {"regex": "[0-9]+"}, {}, "LocalEngine has no grammars, which SamplingSpec"),
    ],
    ids=["an engine that cannot", "a policy loss", "vllm at another temperature", "regex"],
)
def test_what_an_engine_cannot_do_is_refused_where_it_is_needed_before_anything_is_loaded(
    tmp_path: Path, engine: Any, sampling: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    spec = SamplingSpec(group_size=2, max_new_tokens=4, **sampling)
    rollouts = RolloutCallback(digits, engine=engine, sampling=spec)
    trainer, module, data, _ = setup_run(tmp_path, module_arguments=arguments, rollouts=rollouts)
    with pytest.raises(ValueError, match=says):
        trainer.fit(module, data)
    assert not hasattr(module, "policy")


def test_without_a_correction_they_are_not_needed_and_the_mismatch_is_not_known(tmp_path: Path) -> None:
    sampling = SamplingSpec(group_size=4, max_new_tokens=4, top_p=0.9)
    rollouts = RolloutCallback(digits, engine=OnlyTruncated(), sampling=sampling)
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
