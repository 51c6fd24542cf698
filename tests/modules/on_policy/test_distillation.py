"""OnPolicyDistillationModule against loops written by hand in float64; on ranks: ``test_ppo_runs.py``.

Covers distillation.py and teachers.py.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_module import LazyModule
from plain_sgd import PlainSGD, sgd_by_hand
from rl_runs import additions, digits, fit_run, setup_run
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhfkit import (
    OnPolicyDistillationModule,
    PromptDataModule,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.losses import group_advantages
from rlhfkit.modules.parts.teacher import DivergenceLoss, Teacher, TeacherAdvantages

from .ppo_cases import check_moved_alike

datasets = LazyModule("datasets")

CLIP, LR, TEMPERATURE = 0.2, 0.05, 0.8


class PlainDistillation(PlainSGD, OnPolicyDistillationModule):
    """On-policy distillation with SGD."""


def sampling(size: int = 4, tokens: int = 6) -> SamplingSpec:
    return SamplingSpec(group_size=size, max_new_tokens=tokens, temperature=TEMPERATURE)


def distributions(model: Any, sample: Sample) -> tuple[Tensor, Tensor]:
    """(n, V) log-probs where the sample's tokens were chosen, at the temperature of sampling; and the (n,) tokens."""
    ids = torch.tensor([sample.all_token_ids.tolist()])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double() / TEMPERATURE
    return logits.log_softmax(-1)[-len(sample.token_ids) :], ids[0, -len(sample.token_ids) :]


def sampled(logprobs: tuple[Tensor, Tensor]) -> Tensor:
    """(n,) log-probs of the sampled tokens."""
    return logprobs[0].gather(-1, logprobs[1][:, None])[:, 0]


def of_two_kinds(file: str, **arguments: Any) -> PromptDataModule:
    """Prompts for two teachers."""
    rows = [row | {"kind": ("even", "odd")[index % 2]} for index, row in enumerate(additions(40))]
    return PromptDataModule(datasets.Dataset.from_list(rows), **arguments)


CASES = ["sampled token", "sampled token, two teachers", "sampled token and reward", "whole distribution", "and reward"]


@pytest.mark.parametrize("case", CASES)
def test_an_iteration_is_the_loop_by_hand(tmp_path: Path, case: str) -> None:
    """SGD, one sequence at a time; with two teachers each prompt has that of its domain."""
    compared, rewarded, several = not case.startswith("sampled"), case.endswith("reward"), "two" in case
    teachers = {kind: str(tmp_path / kind) for kind in ("even", "odd")}
    for seed, folder in enumerate(teachers.values(), 1):
        tiny_model(folder, seed=seed if several else 1)
    teacher = Teacher(teachers, column="kind") if several else Teacher(teachers["even"])
    how = DivergenceLoss("reverse_kl", 0.7, chunk_size=7) if compared else TeacherAdvantages(0.7, gamma=0.5)
    knobs = {"lr": LR, "parts": [teacher, how], "reward_coef": 0.3 * rewarded}
    trainer, module, rollouts = fit_run(
        tmp_path,
        module=PlainDistillation,
        module_arguments=knobs | ({"clip_high": CLIP} if rewarded or not compared else {}),
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        datamodule=of_two_kinds,
        rollouts=RolloutCallback(digits if rewarded else None, sampling=sampling()),
        max_epochs=1,
    )
    assert trainer.global_step == 2
    assert ("rollout/reward" in trainer.callback_metrics) == rewarded
    samples = rollouts.samples
    rewards = torch.tensor([sample.reward or 0.0 for sample in samples], dtype=torch.float64)
    standard = group_advantages(rewards, torch.tensor([sample.prompt.index for sample in samples]))
    student, *tellers = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64) for name in ("model", *teachers)
    )
    start = copy.deepcopy(student)
    for number in (0, 1):
        rows = (rollouts.experience.update == number).nonzero()[:, 0].tolist()
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            teller = tellers[samples[row].prompt.metadata["kind"] == "odd"]
            mine, old, told = (distributions(model, samples[row]) for model in (student, start, teller))
            advantage = 0.3 * rewarded * standard[row] * torch.ones_like(sampled(old))
            if compared:
                total = total + 0.7 * (mine[0].exp() * (mine[0] - told[0].detach())).sum()
            else:
                later = torch.zeros((), dtype=torch.float64)
                for step in reversed(range(len(advantage))):
                    later = (sampled(told)[step] - sampled(old)[step]).detach() + 0.5 * later
                    advantage[step] += 0.7 * later
            ratio = (sampled(mine) - sampled(old).detach()).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
        (total / sum(len(samples[row].token_ids) for row in rows)).backward()
        sgd_by_hand(student, lr=LR)
    check_moved_alike(module.policy, student, start)


def test_rewards_that_matter_are_asked_for(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=OnPolicyDistillationModule,
        module_arguments={"teacher": "elsewhere", "reward_coef": 0.5},
        rollouts=RolloutCallback(sampling=sampling()),
    )
    with pytest.raises(ValueError, match=r"OnPolicyDistillationModule learns from rewards.*RolloutCallback\(reward="):
        trainer.fit(module, data)
    with pytest.raises(ValueError, match="group_size=1 every advantage is 0"):
        module.check_group_size(1)


@pytest.mark.parametrize(
    ("column", "message"), [("source", "source"), ("kind", "names odd, and there are teachers for even")]
)
def test_prompts_without_a_teacher_are_refused(tmp_path: Path, column: str, message: str) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=OnPolicyDistillationModule,
        module_arguments={"parts": [Teacher({"even": "elsewhere"}, column=column)]},
        datamodule=of_two_kinds,
        rollouts=RolloutCallback(sampling=sampling()),
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data)
