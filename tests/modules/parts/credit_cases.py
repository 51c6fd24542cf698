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
from rl_runs import fit_run
from tiny_models import tiny_model
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import Experience, GRPOModule, PPOModule
from rlhfkit.modules.parts.advantages import (
    AdvantagesBy,
    TokenCredit,
)
from rlhfkit.modules.parts.critic import CriticWarmup
from rlhfkit.modules.parts.teacher import DivergenceLoss, ScaledAdvantages
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


def warmup_formula(folder: Path) -> None:
    """The policy is bitwise the same for so many steps, and then not."""
    before: list[Tensor] = []
    moments: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not batch_idx % trainer.accumulate_grad_batches:
                moments.append(any(one in trainer.optimizers[0].state for one in pl_module.policy.parameters()))
                before.append(torch.cat([one.detach().flatten() for one in pl_module.policy.parameters()]))

    fit_run(
        folder,
        module=PPOModule,
        module_arguments={"lr": 0.05, "parts": [CriticWarmup(2)], "optimization": {"weight_decay": 0.1}},
        callbacks=[Watch()],
    )
    assert moments == [False, False, False, True]  # of Adam, which has not begun there
    assert torch.equal(before[0], before[2])
    assert not torch.equal(before[2], before[3])


# ---------------------------------------------------------------------- a teacher


@functools.cache
def teacher_folder() -> str:
    """A model with the tokens of all runs, and other weights."""
    return str(tiny_model(Path(tempfile.mkdtemp()), seed=5))


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
