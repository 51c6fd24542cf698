"""The formulas of advantages, of a critic and of what a teacher teaches, by hand."""

import dataclasses
import functools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD
from rl_runs import fit_run
from tiny_models import tiny_model

from modules.on_policy.ppo_cases import PlainPPO
from modules.on_policy.test_base import experience
from rlhfkit import OnlineDPOModule, OnPolicyDistillationModule, PPOModule
from rlhfkit.modules.parts import (
    GAE,
    AdvantagesBy,
    Critic,
    CriticWarmup,
    DivergenceLoss,
    GroupAdvantages,
    Pairs,
    Returns,
    Teacher,
    TeacherAdvantages,
    TokenCredit,
    ValueLoss,
    WhitenAdvantages,
)
from rlhfkit.modules.parts.teacher import ScaledAdvantages

from .cases import ENDS, UNSCALED, Watch, attached, case, flat

case(partial(AdvantagesBy, "opo_advantages"))("test_base.py")
case(partial(GroupAdvantages, "none"))("test_base.py")
case(WhitenAdvantages, module=UNSCALED)("test_ppo.py")
case(partial(Critic, lr=0.02, normalize=True, bootstrap_truncated=True), sampling=ENDS, kind=PlainPPO)("test_ppo.py")
for estimates in (GAE, Returns):
    case(partial(estimates, 0.9, 0.5), kind=PlainPPO)("test_ppo.py")
case(partial(ValueLoss, 0.5, clip=1e-3), kind=PlainPPO)("test_ppo.py")
case(partial(ScaledAdvantages, 0.5), module=UNSCALED)("test_distillation.py")


@case(partial(TokenCredit, 0.5))
def credit_formula(folder: Path) -> None:
    """The sample's advantage at its last token, discounted before it; with what tokens earn, that from each on."""
    rows = dataclasses.replace(experience(), advantages=torch.arange(6.0)[:, None].expand(6, 6))
    mask = rows.action_mask
    earned = torch.where(mask, torch.arange(36.0).view(6, 6) / 10, 0.0)
    for part, given in ((TokenCredit(0.5), None), (TokenCredit(0.5, earned=True), earned)):
        found = (
            attached(part, advantage_scale="none").prepare(dataclasses.replace(rows, token_rewards=earned)).advantages
        )
        for row in range(6):
            steps = mask[row].nonzero()[:, 0].tolist()
            rewards = {step: 0.0 if given is None else float(given[row, step]) for step in steps}
            rewards[steps[-1]] += row - sum(rewards.values())
            for step in steps:
                expected = sum(0.5 ** (later - step) * value for later, value in rewards.items() if later >= step)
                assert float(found[row, step]) == pytest.approx(expected, abs=1e-5)


@case(partial(CriticWarmup, 2), kind=PlainPPO)
def warmup_formula(folder: Path) -> None:
    """The policy is bitwise the same for so many steps, and then not."""
    watch = Watch()
    fit_run(
        folder,
        module=PPOModule,
        module_arguments={"lr": 0.05, "parts": [CriticWarmup(2)], "optimization": {"weight_decay": 0.1}},
        callbacks=[watch],
    )
    policies = [flat(policy.parameters()) for policy, _, _, _ in watch.seen[:4]]
    assert [bool(moments.any()) for _, moments, _, _ in watch.seen[:4]] == [False, False, False, True]
    assert torch.equal(policies[0], policies[2])
    assert not torch.equal(policies[2], policies[3])


# ---------------------------------------------------------------------- a teacher


@functools.cache
def teacher_folder() -> str:
    """A model with the tokens of all runs, and other weights."""
    return str(tiny_model(Path(tempfile.mkdtemp()), seed=5))


class Distilled(PlainSGD, OnPolicyDistillationModule):
    """On-policy distillation with SGD."""

    def __init__(self, model: str, teacher: str | None = None, **kwargs: Any) -> None:
        super().__init__(model, teacher or teacher_folder(), **kwargs)


class Judged(PlainSGD, OnlineDPOModule):
    """Online DPO with SGD."""


case(partial(Pairs, truncated=False), kind=Judged, sampling=ENDS)("test_online_dpo.py")
case(lambda: Teacher(teacher_folder()), "Teacher", always=True)("test_distillation.py")
advantages = partial(TeacherAdvantages, 0.5, gamma=0.5)
case(advantages, metrics=("distillation/reverse_kl",), kind=Distilled)("test_distillation.py")
divergence = partial(DivergenceLoss, "reverse_kl", 0.5, top_k=4)


@case(divergence, metrics=("distillation/divergence",), kind=Distilled)
def divergence_formula(folder: Path) -> None:
    """Reverse KL of the teacher's four likeliest tokens and one category of all others."""
    part = divergence()
    Distilled("no/model", parts=[part])
    student, teacher = (torch.randn(7, 11, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2))
    found = part.compare(student, teacher, 0.8)
    p, q = (logits.div(0.8).softmax(-1) for logits in (student, teacher))
    likeliest = q.topk(4, -1).indices
    p, q = (torch.cat([chosen := each.gather(-1, likeliest), 1 - chosen.sum(-1, keepdim=True)], -1) for each in (p, q))
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)
