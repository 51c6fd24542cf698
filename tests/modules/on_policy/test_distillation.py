"""OnPolicyDistillationModule against loops written by hand in float64, and learning a known teacher.

Covers distillation.py and teachers.py.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lazy_module import LazyModule
from plain_sgd import PlainSGD
from rl_runs import digits, fit_run, samples_of_all_ranks, setup_run, weights
from strategies import ranks
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


def by_hand(folder: Path, rollouts: RolloutCallback, token_loss: Callable[..., Tensor]) -> tuple[Any, Any]:
    """One iteration of SGD, one sequence at a time; ``token_loss(student, old, teacher, sample, row)`` gives (n,)."""
    student = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float64)
    start, samples = copy.deepcopy(student), rollouts.samples
    for number in (0, 1):
        rows = (rollouts.experience.update == number).nonzero()[:, 0].tolist()
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            with torch.no_grad():
                old, told = (distributions(model, samples[row]) for model in (start, teacher))
            total = total + token_loss(distributions(student, samples[row]), old, told, row).sum()
        (total / sum(len(samples[row].token_ids) for row in rows)).backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= LR * parameter.grad
                parameter.grad = None
    return student, start


def surrogate(student: Any, old: Any, told: Any, advantage: Tensor) -> Tensor:
    ratio = (sampled(student) - sampled(old)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


@pytest.mark.parametrize("case", ["sampled token", "sampled token and reward", "whole distribution", "and reward"])
def test_an_iteration_is_the_loop_by_hand(tmp_path: Path, case: str) -> None:
    tiny_model(tmp_path / "teacher", seed=1)
    compared, rewarded = not case.startswith("sampled"), case.endswith("reward")
    reward_coef = 0.3 * rewarded
    how = DivergenceLoss("reverse_kl", 0.7, chunk_size=7) if compared else TeacherAdvantages(0.7, gamma=0.5)
    knobs: dict[str, Any] = {"parts": [how], "reward_coef": reward_coef}
    trainer, module, rollouts = fit_run(
        tmp_path,
        module=PlainDistillation,
        module_arguments={"teacher": str(tmp_path / "teacher"), "lr": LR}
        | ({"clip_high": CLIP} if rewarded or not compared else {})
        | knobs,
        data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        rollouts=RolloutCallback(digits, sampling=sampling()),
        max_epochs=1,
    )
    assert trainer.global_step == 2
    rewards = torch.tensor([sample.reward for sample in rollouts.samples], dtype=torch.float64)
    standard = group_advantages(rewards, torch.tensor([sample.prompt.index for sample in rollouts.samples]))

    def token_loss(student: Any, old: Any, told: Any, row: int) -> Tensor:
        advantage = 0.3 * rewarded * standard[row] * torch.ones_like(sampled(old))
        if compared:
            reverse_kl = (student[0].exp() * (student[0] - told[0])).sum(-1)
            return 0.7 * reverse_kl + surrogate(student, old, told, advantage)
        later = torch.zeros((), dtype=torch.float64)
        for step in reversed(range(len(advantage))):
            later = sampled(told)[step] - sampled(old)[step] + 0.5 * later
            advantage[step] += 0.7 * later
        return surrogate(student, old, told, advantage)

    expected, start = by_hand(tmp_path, rollouts, token_loss)
    theirs, first = expected.state_dict(), start.state_dict()
    moved = sum(float((theirs[name] - first[name]).abs().sum()) for name in theirs)
    error = sum(float((mine.double() - theirs[name]).abs().sum()) for name, mine in weights(module).items())
    assert error < 1e-3 * moved  # float32 against float64
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]
    assert {name.partition(".")[0] for name in saved} == {"policy"}  # the teacher is loaded by name


def train_on_ranks(folder: Path, data: str, world: int) -> list[Any]:
    """Entry point of a rank: train in all ways with teachers as inference engines of ZeRO 3."""
    from rlhfkit.distributed import full_parameters

    results: list[Any] = []
    teachers = Teacher({"even": f"{data}/teacher", "odd": f"{data}/model"}, column="kind")
    several = {"teacher": None, "parts": [teachers.plain()]}
    rows = [{"prompt": f"{i}+{i}=", "kind": ("even", "odd")[i % 2]} for i in range(40)]
    for knobs in ({}, {"divergence": "jsd"}, several):

        class Measure(L.Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                parameters = list(pl_module.policy.parameters())
                with full_parameters(parameters):
                    results.append(sum(float(each.detach().double().abs().sum()) for each in parameters))

        trainer, module, _, rollouts = setup_run(
            Path(data),
            module=PlainDistillation,
            module_arguments={"teacher": f"{data}/teacher", "lr": LR} | knobs,
            rollouts=RolloutCallback(sampling=sampling()),
            callbacks=[Measure()],
            max_epochs=1 if knobs else 2,  # the first teacher also follows the student's second samples
            strategy="rlhf_zero3" if world > 1 else "auto",
            devices=world,
            use_distributed_sampler=False,
        )
        prompts = PromptDataModule(datasets.Dataset.from_list(rows), rollout_batch_size=8, micro_batch_size=8 // world)
        trainer.fit(module, prompts)
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
    tiny_model(tmp_path / "teacher", seed=1)
    arguments = {"teacher": str(tmp_path / "teacher"), "reward_coef": 0.5}
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=OnPolicyDistillationModule,
        module_arguments=arguments,
        rollouts=RolloutCallback(sampling=sampling()),
    )
    with pytest.raises(ValueError, match=r"OnPolicyDistillationModule learns from rewards.*RolloutCallback\(reward="):
        trainer.fit(module, data)
    compares = RolloutCallback(digits, sampling=sampling(1))
    trainer, module, data, _ = setup_run(
        tmp_path, module=OnPolicyDistillationModule, module_arguments=arguments, rollouts=compares
    )
    with pytest.raises(ValueError, match="group_size=1 every advantage is 0"):
        trainer.fit(module, data)


def test_each_prompt_has_the_teacher_of_its_domain(tmp_path: Path) -> None:
    names = {"even": tmp_path / "even", "odd": tmp_path / "odd"}
    for seed, name in enumerate(names.values(), 1):
        tiny_model(name, seed=seed)

    def run(**column: str) -> RolloutCallback:
        teachers = {domain: str(name) for domain, name in names.items()}
        trainer, module, _, rollouts = setup_run(
            tmp_path,
            module=PlainDistillation,
            module_arguments={"parts": [Teacher(teachers, **column)]} if column else {"teacher": teachers},
            rollouts=RolloutCallback(sampling=sampling(1, 6)),
            max_epochs=1,
        )
        rows = [{"prompt": f"{i}+{i}=", "kind": ("even", "odd")[i % 2]} for i in range(40)]
        data = PromptDataModule(datasets.Dataset.from_list(rows), rollout_batch_size=8, micro_batch_size=4)
        trainer.fit(module, data)
        assert "rollout/reward" not in trainer.callback_metrics
        return rollouts

    rollouts = run(column="kind")
    samples, experience = rollouts.samples, rollouts.experience
    assert {sample.prompt.metadata["kind"] for sample in samples} == set(names)
    for row, sample in enumerate(samples):
        model = AutoModelForCausalLM.from_pretrained(names[sample.prompt.metadata["kind"]])
        with torch.no_grad():
            expected = sampled(distributions(model, sample))
        found = experience.columns["teacher_logprobs"][row, experience.action_mask[row]]
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="source"):
        run()
    names.pop("odd")
    with pytest.raises(ValueError, match="names odd, and there are teachers for even"):
        run(column="kind")
