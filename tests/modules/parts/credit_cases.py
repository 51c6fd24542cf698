"""The formulas of advantages and of a critic, by hand."""

import dataclasses
import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import setup_run
from tiny_models import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from modules.on_policy.ppo_cases import logprobs_of
from modules.on_policy.test_base import experience
from rlhfkit import Experience, GRPOModule, OnlineDPOModule, PPOModule
from rlhfkit.modules.parts.advantages import (
    AdvantagesBy,
    GroupAdvantages,
    TokenCredit,
    WhitenAdvantages,
)
from rlhfkit.modules.parts.critic import GAE, Critic, CriticWarmup, Returns, ValueLoss
from rlhfkit.modules.parts.pairs import Pairs
from rlhfkit.modules.parts.teacher import DivergenceLoss, ScaledAdvantages, Teacher, TeacherAdvantages
from rlhfkit.modules.teachers import ComparedOutput


class Half:
    """An estimator with an argument: a factor of the difference to the mean of all."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def __call__(self, rewards: Tensor, group: Tensor) -> Tensor:
        return self.factor * (rewards - rewards.mean())


def prepared(part: Any, rows: Experience, **module: Any) -> Experience:
    """Rows after a part of a module that is not loaded."""
    GRPOModule("no/model", parts=[part], **module)
    return part.prepare(rows)


def of_tokens(rows: Experience, values: list[float]) -> Tensor:
    return torch.tensor(values)[:, None].expand_as(rows.action_mask)


def group_formula(folder: Path) -> None:
    """Standard scores, or differences, within groups."""
    rows = experience()
    groups = [rows.rewards[:3].tolist(), rows.rewards[3:].tolist()]
    centred = [value - statistics.fmean(group) for group in groups for value in group]
    scores = [(value - statistics.fmean(group)) / statistics.stdev(group) for group in groups for value in group]
    for scale, expected in (("none", centred), ("group", scores)):
        found = prepared(GroupAdvantages(scale), rows).advantages  # type: ignore[arg-type]
        torch.testing.assert_close(found, of_tokens(rows, expected), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="with group_size=1 every advantage is 0"):
        GRPOModule("no/model").check_group_size(1)


def pairs_formula(folder: Path) -> None:
    """The best and the worst answer of each prompt that were not cut off; nothing is learned from the others."""
    rows = dataclasses.replace(experience(), rewards=torch.tensor([0.0, 2.0, 1.0, 3.0, 3.0, 3.0]))
    rows = dataclasses.replace(rows, truncated=torch.tensor([True, False, False, False, False, False]))
    for truncated, expected in ((True, [-1.0, 1.0, 0.0]), (False, [0.0, 1.0, -1.0])):
        part = Pairs(truncated=truncated)
        OnlineDPOModule("no/model", parts=[part])
        found = part.prepare(rows)
        assert found.advantages is not None
        assert found.advantages[:, 0].tolist() == [*expected, 0.0, 0.0, 0.0]
        assert torch.equal(found.action_mask, rows.action_mask & (found.advantages != 0))


def advantages_by_formula(folder: Path) -> None:
    """The function's result, in place of the module's."""
    rows = experience()
    expected = [0.25 * (value - statistics.fmean(rows.rewards.tolist())) for value in rows.rewards.tolist()]
    torch.testing.assert_close(
        prepared(AdvantagesBy(Half, {"factor": 0.25}), rows).advantages, of_tokens(rows, expected)
    )
    module = GRPOModule("no/model", parts=[AdvantagesBy(Half, {"factor": 0.25})])
    assert [type(part).__name__ for part in module.parts] == ["OldLogprobs", "EngineMismatch", "AdvantagesBy"]
    torch.testing.assert_close(module.order[-1].prepare(rows).advantages, of_tokens(rows, expected))


def credit_formula(folder: Path) -> None:
    """The sample's advantage at its last token, discounted before it; with what tokens earn, that from each on."""
    rows = dataclasses.replace(experience(), advantages=torch.arange(6.0)[:, None].expand(6, 6))
    mask = rows.action_mask
    earned = torch.where(mask, torch.arange(36.0).view(6, 6) / 10, 0.0)
    for part, given in ((TokenCredit(0.5), None), (TokenCredit(0.5, earned=True), earned)):
        found = prepared(part, dataclasses.replace(rows, token_rewards=earned), advantage_scale="none").advantages
        for row in range(6):
            steps = mask[row].nonzero()[:, 0].tolist()
            rewards = {step: 0.0 if given is None else float(given[row, step]) for step in steps}
            rewards[steps[-1]] += row - sum(rewards.values())
            for step in steps:
                expected = sum(0.5 ** (later - step) * value for later, value in rewards.items() if later >= step)
                assert float(found[row, step]) == pytest.approx(expected, abs=1e-5)


def whiten_formula(folder: Path) -> None:
    """Mean 0 and deviation 1 over trained tokens."""
    rows = dataclasses.replace(experience(), advantages=torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))
    assert rows.advantages is not None
    given = rows.advantages[rows.action_mask].tolist()
    found = prepared(WhitenAdvantages(), rows).advantages
    assert found is not None
    mean, std = statistics.fmean(given), statistics.pstdev(given)  # as OpenRLHF, not Bessel's
    expected = torch.tensor([(value - mean) / std for value in given])
    torch.testing.assert_close(found[rows.action_mask], expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- a critic


def lambda_returns(rows: Experience, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, token by token; the reward is the last token's."""
    advantages, returns = torch.zeros(6, 6), torch.zeros(6, 6)
    values = rows.columns["values"]
    for row in range(6):
        following, after = 0.0, 0.0
        steps = rows.action_mask[row].nonzero()[:, 0].tolist()
        for step in reversed(steps):
            reward = float(rows.rewards[row]) if step == steps[-1] else 0.0
            value = float(values[row, step])
            following = reward + gamma * after - value + gamma * lam * following
            advantages[row, step], returns[row, step], after = following, following + value, value
    return advantages, returns


def with_values() -> Experience:
    rows = experience()
    values = torch.randn(6, 6, generator=torch.Generator().manual_seed(4))
    return rows.with_columns(values=values.where(rows.action_mask, 0.0), ref_logprobs=None)


def gae_formula(folder: Path) -> None:
    """Sums of discounted temporal differences."""
    rows, part = with_values(), GAE(0.9, 0.5)
    PPOModule("no/model", parts=[part], kl_coef=0.0)
    torch.testing.assert_close(part.prepare(rows).advantages, lambda_returns(rows, 0.9, 0.5)[0])


def returns_formula(folder: Path) -> None:
    """Advantages plus values; without normalization in the units of the reward."""
    rows, part = with_values(), Returns(0.9, 0.5)
    module = PPOModule("no/model", parts=[part], kl_coef=0.0)
    module.critic_part._predicted = rows.columns["values"]
    found = part.prepare(rows)
    torch.testing.assert_close(found.columns["returns"], lambda_returns(rows, 0.9, 0.5)[1])
    with pytest.raises(ValueError, match="GRPOModule has no Critic among its parts"):
        GRPOModule("no/model", parts=[Returns()])


def critic_formula(folder: Path) -> None:
    """Values in units of the reward before advantages, in those of the critic for its loss; moments of all returns."""
    rows, part = with_values(), Critic(normalize=True)
    module: Any = PPOModule("no/model", parts=[part], kl_coef=0.0, lam=1.0)
    raw = rows.columns["values"]
    module.critic, module.passes.forward = torch.nn.Identity(), lambda *_: raw
    seen: list[float] = []
    for _ in range(2):
        mean, std = (statistics.fmean(seen), statistics.stdev(seen)) if seen else (0.0, 1.0)
        given = part.prepare(rows)
        expected = ((raw * std + mean) * rows.action_mask).float()
        torch.testing.assert_close(given.columns["values"], expected, rtol=1e-5, atol=1e-5)
        returns = lambda_returns(given, 1.0, 1.0)[1]
        seen += returns[rows.action_mask].tolist()
        mean, std = statistics.fmean(seen), statistics.stdev(seen)
        learned = next(one for one in module.parts if isinstance(one, Returns)).prepare(given)
        assert torch.equal(learned.columns["values"], raw)
        normal = torch.where(rows.action_mask, (returns - mean) / std, 0.0).float()
        torch.testing.assert_close(learned.columns["returns"], normal, rtol=1e-4, atol=1e-4)


def value_loss_formula(folder: Path) -> None:
    """Half the squared error, of the worse of the value and the clipped one, over the step's tokens."""
    rows, part = with_values(), ValueLoss(0.5, clip=0.2)
    PPOModule("no/model", parts=[part], kl_coef=0.0)
    rows = rows.with_columns(returns=rows.columns["values"] + 0.5)
    now = rows.columns["values"] + 0.3
    clipped = rows.columns["values"] + 0.2
    goal = rows.columns["returns"]
    worse = torch.maximum((now - goal).square(), (clipped - goal).square())
    expected = 0.5 * worse[rows.action_mask].sum() / 20  # tokens of the step, which has other micro-batches
    torch.testing.assert_close(part.loss(rows, now).loss, expected)


def warmup_formula(folder: Path) -> None:
    """The policy is bitwise the same for so many steps, and then not."""
    before: list[Tensor] = []
    moments: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not batch_idx % trainer.accumulate_grad_batches:
                moments.append(any(one in trainer.optimizers[0].state for one in pl_module.policy.parameters()))
                before.append(torch.cat([one.detach().flatten() for one in pl_module.policy.parameters()]))

    trainer, module, data, _ = setup_run(
        folder,
        module=PPOModule,
        module_arguments={"lr": 0.05, "parts": [CriticWarmup(2)], "optimization": {"weight_decay": 0.1}},
        callbacks=[Watch()],
    )
    trainer.fit(module, data)
    assert moments == [False, False, False, True]  # of Adam, which has not begun there
    assert torch.equal(before[0], before[2])
    assert not torch.equal(before[2], before[3])


# ---------------------------------------------------------------------- a teacher


@functools.cache
def teacher_folder() -> str:
    """A model with the tokens of all runs, and other weights."""
    return str(tiny_model(Path(tempfile.mkdtemp()), seed=5))


def teacher_formula(folder: Path) -> None:
    """Log-probs of the teacher for every token of an iteration."""
    arguments = {"parts": [Teacher(teacher_folder())]}
    trainer, module, data, rollouts = setup_run(folder, module_arguments=arguments, max_epochs=1)
    trainer.fit(module, data)
    teacher, rows = AutoModelForCausalLM.from_pretrained(teacher_folder(), dtype=torch.float32), rollouts.experience
    assert rows is not None
    for row, sample in enumerate(rollouts.samples):
        found = rows.columns["teacher_logprobs"][row][rows.action_mask[row]]
        with torch.no_grad():
            torch.testing.assert_close(found, logprobs_of(teacher.eval(), sample).float(), rtol=1e-4, atol=1e-5)


def teacher_advantages_formula(folder: Path) -> None:
    """Differences to the teacher, discounted, and added to the reward's advantage."""
    rows = experience()
    assert rows.old_logprobs is not None
    teacher = rows.columns["ref_logprobs"]
    rows = rows.with_columns(teacher_logprobs=teacher)
    for coef in (0.0, 0.25):
        part = TeacherAdvantages(2.0, gamma=0.5)
        GRPOModule("no/model", parts=[Teacher("no/teacher"), part])
        before = coef * torch.arange(6.0)[:, None].expand(6, 6) if coef else None
        found = part.prepare(dataclasses.replace(rows, advantages=before)).advantages
        assert found is not None
        for row in range(6):
            steps = rows.action_mask[row].nonzero()[:, 0].tolist()
            gaps = {step: float(teacher[row, step] - rows.old_logprobs[row, step]) for step in steps}
            for step in steps:
                later = sum(0.5 ** (other - step) * gaps[other] for other in steps if other >= step)
                assert float(found[row, step]) == pytest.approx(coef * row + 2.0 * later, abs=1e-5)
        assert float(found[~rows.action_mask].abs().sum()) == 0.0


def divergence_formula(folder: Path) -> None:
    """Reverse KL of the teacher's four likeliest tokens and one category of all others, over the step's tokens."""
    from .cases import Distilled

    rows, part = experience(), DivergenceLoss("reverse_kl", 0.5, top_k=4)
    module = Distilled("no/model", parts=[part])
    student, teacher = (torch.randn(7, 11, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    found = part.compare(student, teacher, 0.8)
    p, q = (logits.div(0.8).softmax(-1) for logits in (student, teacher))
    likeliest = q.topk(4, -1).indices
    p, q = (torch.cat([chosen := each.gather(-1, likeliest), 1 - chosen.sum(-1, keepdim=True)], -1) for each in (p, q))
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
    values = torch.rand(rows.action_mask.shape, generator=torch.Generator().manual_seed(3))
    out = ComparedOutput.of(values, None, values, None)
    expected = 0.5 * values[rows.action_mask].sum() / rows.step_tokens * rows.step_micro_batches
    torch.testing.assert_close(part.term(rows, out, values).loss, expected)
    assert module.hooks["policy_output"] == [part.policy_output]


def scaled_formula(folder: Path) -> None:
    """A factor, and 0 outside the mask."""
    rows = dataclasses.replace(experience(), advantages=torch.arange(36.0).view(6, 6))
    expected = torch.where(rows.action_mask, torch.arange(36.0).view(6, 6) / 4, 0.0)
    torch.testing.assert_close(prepared(ScaledAdvantages(0.25), rows).advantages, expected)
