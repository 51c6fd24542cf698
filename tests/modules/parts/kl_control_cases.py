"""The formulas of KL penalties and their control, by hand and from the log-probs of the policies of a run."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run
from tiny_models import completion_logprobs
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, OnPolicyModule, PPOModule
from rlhfkit.losses import kl_estimate
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.parts.advantages import GroupAdvantages
from rlhfkit.modules.parts.kl_control import KLTarget, StopEarly
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPenalty

LIMIT = 2e-2


def coefficient(module: Any) -> float:
    """That of the module's KL penalty."""
    return next(part.coef for part in module.parts if isinstance(part, KLPenalty))


class Watch(L.Callback):
    """Weights before each update, the state of the optimizer, and which samples each update was for."""

    def __init__(self) -> None:
        self.policies: list[Any] = []
        self.moments: list[list[Tensor]] = []
        self.critics: list[list[Tensor]] = []
        self.samples: list[list[Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            rollouts = trainer.callbacks[0]
            number = batch_idx // trainer.accumulate_grad_batches
            rows = (rollouts.experience.update == number).nonzero()[:, 0].tolist()
            self.samples.append([rollouts.samples[row] for row in rows])
            self.policies.append(copy.deepcopy(pl_module.policy))
            self.critics.append([parameter.detach().clone() for parameter in pl_module.critic.parameters()])
            state = trainer.optimizers[0].state
            kept = [state[p]["exp_avg"].clone() for p in pl_module.policy.parameters() if p in state]
            self.moments.append(kept)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def stop_early_formula(folder: Path) -> None:
    """Updates stop where the distance passes the limit, and begin again with the next iteration; the critic goes on."""
    watch, stopping = Watch(), StopEarly(LIMIT)
    trainer, made, _ = fit_run(
        folder,
        module=PPOModule,
        module_arguments={"lr": 1e-3, "parts": [stopping], "optimization": {"weight_decay": 0.1}},
        data_arguments={"rollout_batch_size": 8, "micro_batch_size": 4},  # four updates of two micro-batches
        callbacks=[watch],
    )
    watch.policies.append(made.policy)
    watch.moments.append(watch.moments[-1] if stopping.stopped else [])
    made_updates, expected_stops = 0, 0
    for first in (0, 4):
        stopped = False
        for number in range(first, first + 4):
            before, after = watch.policies[number], watch.policies[number + 1]
            with torch.no_grad():
                ratios = [
                    completion_logprobs(before, sample) - completion_logprobs(watch.policies[first], sample)
                    for sample in watch.samples[number]
                ]
            difference = torch.cat(ratios)
            distance = float((difference.exp() - 1 - difference).mean())  # k3 of old to new
            assert abs(distance / LIMIT - 1) > 0.01  # no tie that rounding decides
            stopped = stopped or distance > LIMIT
            assert same(before, after) == stopped, (number, distance)
            if stopped and watch.moments[number]:
                pairs = zip(watch.moments[number], watch.moments[number + 1], strict=True)
                assert all(torch.equal(left, right) for left, right in pairs)
            expected_stops += stopped
            made_updates += not stopped
        assert stopped
    assert made_updates >= 3
    assert trainer.global_step == 8  # steps are counted, whoever took part
    share = trainer.callback_metrics["policy/kl_early_stopped"]  # of the last iteration
    assert 0 < share < 1
    pairs = zip(watch.critics, watch.critics[1:], strict=False)
    assert all(not torch.equal(one[0], other[0]) for one, other in pairs)


def kl_target_formula(folder: Path) -> None:
    """The coefficient moves towards its target by the rule of Ziegler et al., and is remembered."""
    seen: list[tuple[float, float]] = []

    class Keep(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            rollouts = trainer.callbacks[0]
            batch = rollouts.experience
            kl = kl_estimate(batch.old_logprobs, batch.columns["ref_logprobs"], estimator="k3", mask=batch.action_mask)
            seen.append((float(kl.sum() / batch.action_mask.sum()), coefficient(pl_module)))

    arguments = {"kl_coef": 0.1, "parts": [KLTarget(1e-3, horizon=100)], "lr": 1e-2}
    trainer, module, _ = fit_run(folder, module_arguments=arguments, callbacks=[Keep()], max_epochs=3)
    expected = 0.1
    for kl, coef in seen:
        expected *= 1 + min(max(kl / 1e-3 - 1, -0.2), 0.2) * 32 / 100
        assert coef == pytest.approx(expected, rel=1e-6)
    assert seen[0][1] < 0.1 < seen[-1][1]  # no distance at first, then more than wanted
    assert float(trainer.callback_metrics["policy/kl_coef"]) == pytest.approx(seen[-1][1])
    trainer.save_checkpoint(folder / "run.ckpt")
    assert coefficient(GRPOModule.load_from_checkpoint(folder / "run.ckpt")) == coefficient(module)


def kl_penalty_formula(folder: Path) -> None:
    """Ratio times k2, at most 0.1 of each token, as a share of the step's mean."""
    part, rows = KLPenalty(0.5, estimator="k2", clamp=0.1, importance_weight=True), experience()
    GRPOModule("no/model", parts=[part])
    rows.advantages, old, mask = rows.rewards[:, None].expand(6, 6), rows.old_logprobs, rows.action_mask
    logprobs = (old + 0.4 * torch.randn(6, 6, generator=torch.Generator().manual_seed(7))).requires_grad_()
    found = part.term(rows, PolicyOutput(logprobs, None), old)
    total = torch.zeros(())
    for row, step in mask.nonzero().tolist():
        difference = logprobs[row, step] - rows.columns["ref_logprobs"][row, step]
        kl = (difference.square() / 2).clamp(max=0.1)
        total = total + (logprobs[row, step] - old[row, step]).exp() * kl
    expected = 0.5 * total / 20  # of 40 tokens in two micro-batches
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=0)
    pairs = (torch.autograd.grad(loss, logprobs)[0] for loss in (found.loss, expected))
    torch.testing.assert_close(*pairs)
    torch.testing.assert_close(found.metrics["policy/ref_kl"], total.detach() / int(mask.sum()))


def kl_in_reward_formula(folder: Path) -> None:
    """The sum of an answer's KL, or that of each token as a column; k3 of the policy before the iteration."""
    rows = experience()
    difference = rows.columns["ref_logprobs"] - rows.old_logprobs
    kl = torch.where(rows.action_mask, difference.exp() - 1 - difference, 0.0)
    part = KLInReward(0.5, place="sequence", estimator="k3")
    GRPOModule("no/model", parts=[part])
    torch.testing.assert_close(part.prepare(rows).rewards, rows.rewards - 0.5 * kl.sum(-1))
    of_tokens = KLInReward(0.5, place="token", estimator="k3")
    PPOModule("no/model", parts=[of_tokens])
    found = of_tokens.prepare(rows)
    assert found.rewards is rows.rewards
    torch.testing.assert_close(found.columns["token_penalty"], 0.5 * kl)
    with pytest.raises(ValueError, match=r"nothing after it reads the token_penalty .* add what does: TokenCredit"):
        OnPolicyModule("no/model", parts=[KLInReward(0.5, place="token"), GroupAdvantages()])
