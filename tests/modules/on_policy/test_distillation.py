"""OnPolicyDistillationModule against loops written by hand in float64, and learning a known teacher.

Covers distillation.py and teachers.py.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_module import LazyModule
from lightning.pytorch.callbacks import LambdaCallback
from plain_sgd import PlainSGD, sgd_by_hand
from rl_runs import additions, digits, fit_run, samples_of_all_ranks, setup_run
from strategies import ranks
from tiny_models import completion_logprobs, tiny_model
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

from .ppo_cases import check_moved_alike, weight_sum

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


@pytest.mark.parametrize("case", ["sampled token", "sampled token and reward", "whole distribution", "and reward"])
def test_an_iteration_is_the_loop_by_hand(tmp_path: Path, case: str) -> None:
    """SGD, one sequence at a time."""
    tiny_model(tmp_path / "teacher", seed=1)
    compared, rewarded = not case.startswith("sampled"), case.endswith("reward")
    how = DivergenceLoss("reverse_kl", 0.7, chunk_size=7) if compared else TeacherAdvantages(0.7, gamma=0.5)
    knobs = {"teacher": str(tmp_path / "teacher"), "lr": LR, "parts": [how], "reward_coef": 0.3 * rewarded}
    trainer, module, rollouts = fit_run(
        tmp_path,
        module=PlainDistillation,
        module_arguments=knobs | ({"clip_high": CLIP} if rewarded or not compared else {}),
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        rollouts=RolloutCallback(digits, sampling=sampling()),
        max_epochs=1,
    )
    assert trainer.global_step == 2
    samples = rollouts.samples
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    standard = group_advantages(rewards, torch.tensor([sample.prompt.index for sample in samples]))
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64) for name in ("model", "teacher")
    )
    start = copy.deepcopy(student)
    for number in (0, 1):
        rows = (rollouts.experience.update == number).nonzero()[:, 0].tolist()
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            mine, old, told = (distributions(model, samples[row]) for model in (student, start, teacher))
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


def of_two_kinds(file: str, **arguments: Any) -> PromptDataModule:
    """Prompts for two teachers."""
    rows = [row | {"kind": ("even", "odd")[index % 2]} for index, row in enumerate(additions(40))]
    return PromptDataModule(datasets.Dataset.from_list(rows), **arguments)


def train_on_ranks(folder: Path, data: str, world: int) -> list[Any]:
    """Entry point of a rank: train in all ways with teachers as inference engines of ZeRO 3."""
    results: list[Any] = []
    teachers = Teacher({"even": f"{data}/teacher", "odd": f"{data}/model"}, column="kind")
    several = {"teacher": None, "parts": [teachers.plain()]}
    for knobs in ({}, {"divergence": "jsd"}, several):
        summed = LambdaCallback(on_train_end=lambda _, module: results.append(weight_sum(module.policy)))
        _, _, rollouts = fit_run(
            Path(data),
            module=PlainDistillation,
            module_arguments={"teacher": f"{data}/teacher", "lr": LR} | knobs,
            data_arguments={"micro_batch_size": 8 // world},
            datamodule=of_two_kinds,
            rollouts=RolloutCallback(sampling=sampling()),
            callbacks=[summed],
            max_epochs=1 if knobs else 2,  # the first teacher also follows the student's second samples
            strategy="rlhf_zero3" if world > 1 else "auto",
            devices=world,
            use_distributed_sampler=False,
        )
        results.append([sample.token_ids.tolist() for sample in samples_of_all_ranks(rollouts)])
    return results


@pytest.mark.distributed
def test_two_ranks_with_sharded_teachers_train_as_one_rank(tmp_path: Path) -> None:
    for name, seed in (("model", 0), ("teacher", 1)):
        tiny_model(tmp_path / name, seed=seed)
    alone = train_on_ranks(tmp_path, str(tmp_path), 1)
    both = ranks.run("modules.on_policy.test_distillation:train_on_ranks", 2, tmp_path, data=str(tmp_path), world=2)
    assert both[0] == both[1]
    for mine, theirs in zip(both[0], alone, strict=True):
        assert mine == (theirs if isinstance(theirs, list) else pytest.approx(theirs, rel=1e-6))


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    from tiny_models import tiny_tokenizer

    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "teacher")
    other = tiny_tokenizer()
    other.add_tokens(["<think>"])
    other.save_pretrained(tmp_path / "teacher")
    module = OnPolicyDistillationModule(str(tmp_path / "model"), str(tmp_path / "teacher"))
    with pytest.raises(ValueError, match=r"has other tokens than the student .* 1 differ, e\.g\. \['<think>'\]"):
        module.configure_model()


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


def test_each_prompt_has_the_teacher_of_its_domain(tmp_path: Path) -> None:
    names = {"even": tmp_path / "even", "odd": tmp_path / "odd"}
    for seed, name in enumerate(names.values(), 1):
        tiny_model(name, seed=seed)

    def run(**column: str) -> RolloutCallback:
        teachers = {domain: str(name) for domain, name in names.items()}
        trainer, _, rollouts = fit_run(
            tmp_path,
            module=PlainDistillation,
            module_arguments={"parts": [Teacher(teachers, **column)]} if column else {"teacher": teachers},
            data_arguments={"micro_batch_size": 4},
            datamodule=of_two_kinds,
            rollouts=RolloutCallback(sampling=sampling(1, 6)),
            max_epochs=1,
        )
        assert "rollout/reward" not in trainer.callback_metrics
        return rollouts

    rollouts = run(column="kind")
    samples, experience = rollouts.samples, rollouts.experience
    assert {sample.prompt.metadata["kind"] for sample in samples} == set(names)
    for row, sample in enumerate(samples):
        model = AutoModelForCausalLM.from_pretrained(names[sample.prompt.metadata["kind"]])
        found = experience.columns["teacher_logprobs"][row, experience.action_mask[row]]
        torch.testing.assert_close(found, completion_logprobs(model, sample, TEMPERATURE), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="source"):
        run()
    names.pop("odd")
    with pytest.raises(ValueError, match="names odd, and there are teachers for even"):
        run(column="kind")
