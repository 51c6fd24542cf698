"""OnlineDPOModule against a loop written by hand in float64; its pairs, and what it refuses.

Covers base.py and online_dpo.py.
Several ranks, epochs and caps of tokens: ``tests/callbacks/rollout/test_epochs.py``.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD, sgd_by_hand
from rl_runs import digits, fit_run, setup_run, weights
from tiny_models import completion_logprobs
from transformers import AutoModelForCausalLM

from rlhfkit import LocalEngine, OnlineDPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.modules.parts import Pairs

BETA, LR, TEMPERATURE, NLL = 0.4, 0.05, 0.8, 0.3


class PlainOnlineDPO(PlainSGD, OnlineDPOModule):
    """Online DPO with SGD."""


class Finishing(LocalEngine):
    """Says of some answers that they were cut off."""

    def generate(self, *arguments: Any, **more: Any) -> list[Sample]:
        samples = super().generate(*arguments, **more)
        for sample in samples:
            sample.finish_reason = "length" if (sample.prompt.index + sample.sample_index) % 4 == 0 else "stop"
        return samples


def uneven(samples: Sequence[Sample]) -> list[float | None]:
    """Groups with ties, with one that is all alike, and with a sample that cannot be scored."""
    rewards: list[float | None] = []
    for sample in samples:
        value = (sample.token_ids.tolist()[0] + 3 * sample.sample_index) % 4
        rewards.append(None if value == 3 else float(value))
    by_prompt = sorted({sample.prompt.index for sample in samples})
    return [
        1.0 if sample.prompt.index == by_prompt[1] else reward for sample, reward in zip(samples, rewards, strict=True)
    ]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_an_iteration_is_the_loop_by_hand(tmp_path: Path, mask_truncated: bool) -> None:
    sampling = SamplingSpec(group_size=4, max_new_tokens=6, temperature=TEMPERATURE)
    trainer, module, rollouts = fit_run(
        tmp_path,
        module=PlainOnlineDPO,
        module_arguments={"lr": LR, "beta": BETA, "nll_coef": NLL, "parts": [Pairs(truncated=not mask_truncated)]},
        rollouts=RolloutCallback(uneven, engine=Finishing(), sampling=sampling),
        max_epochs=1,
    )
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    reference = copy.deepcopy(policy)
    samples, losses, kept = rollouts.samples, [], 0
    for update in (0, 1):
        total, pairs = torch.zeros((), dtype=torch.float64), 0
        for first in range(16 * update, 16 * update + 16, 4):
            group = [
                sample
                for sample in samples[first : first + 4]
                if sample.reward is not None and not (mask_truncated and sample.finish_reason == "length")
            ]
            best = max(group, key=lambda sample: sample.reward, default=None)
            worst = min(group, key=lambda sample: sample.reward, default=None)
            if best is None or best.reward == worst.reward:
                continue
            margin = 0.0
            for sign, sample in ((1, best), (-1, worst)):
                mine, known = (completion_logprobs(model, sample, TEMPERATURE) for model in (policy, reference))
                margin = margin + sign * (mine.sum() - known.sum().detach())
            total = total - torch.nn.functional.logsigmoid(BETA * margin)
            total, pairs = total - NLL * completion_logprobs(policy, best, TEMPERATURE).mean(), pairs + 1
        (total / pairs).backward()
        losses.append(float(total.detach() / pairs))
        kept += pairs
        sgd_by_hand(policy, lr=LR)
    assert 4 <= kept < 8
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(sum(losses) / 2, rel=1e-5)
    for name, tensor in weights(module).items():
        torch.testing.assert_close(tensor.double(), policy.state_dict()[name], rtol=0, atol=2e-6)


def test_micro_batches_and_groups_without_a_pair_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group_size=1"):
        OnlineDPOModule("model").check_group_size(1)
    rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    trainer, module, data, _ = setup_run(
        tmp_path, module=OnlineDPOModule, data_arguments={"micro_batch_size": 2}, rollouts=rollouts
    )
    with pytest.raises(ValueError, match="raise PromptDataModule"):
        trainer.fit(module, data)
