"""Formulas of what knows how far the policy has moved: old log-probs, KL penalties and their control, by hand."""

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run
from tiny_models import completion_logprobs, tiny_mixture

from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, PPOModule
from rlhfkit.losses import kl_estimate
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.models.forward import unwrap
from rlhfkit.models.routing import attach_routing
from rlhfkit.modules.parts import KLInReward, KLPenalty, KLTarget, MovingReference, Reference, RouterReplay, StopEarly
from rlhfkit.modules.parts.old_policy import OldLogprobs
from rlhfkit.parts import Part, Stage

from .cases import CASES, UNSCALED, Watch, attached, case, fit, flat

LIMIT = 2e-2
case(partial(Reference, None), module={"kl_coef": 0.1}, always=True)("test_ppo.py")
case(partial(MovingReference, 2, alpha=0.25), module={"kl_coef": 5.0})("../test_moving_reference.py")
rerouted = ("policy/rerouted_fraction",)


@case(RouterReplay, metrics=rerouted, of_rows=rerouted, model=tiny_mixture)
def router_replay_formula(folder: Path) -> None:
    """Later updates have the choices of the policy before the iteration, and the first is free."""
    updates: list[int] = []

    class Before(Part):
        def prepare(self, rows: Any) -> Any:
            self.before = copy.deepcopy(unwrap(self.module.policy)).eval()
            attach_routing(self.before)
            return rows

        def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
            mask, chosen = batch.action_mask, batch.attention_mask[:, 1:]
            with torch.no_grad():
                before = policy_output(self.before, batch, mask, temperature=batch.temperature, routing=True)
            updates.append(int(batch.update[0]))
            if updates[-1] == 0:
                torch.testing.assert_close(out.logprobs[mask], before.logprobs[mask])
            else:
                assert torch.equal(batch.columns["routing"][chosen], before.routing[chosen])
                torch.testing.assert_close(old[mask], before.logprobs[mask], atol=1e-5, rtol=0.0)
            return {}

    trainer, _ = fit(folder, CASES["RouterReplay"], parts=[RouterReplay(), Before()], max_epochs=1)
    assert updates == [0, 0, 1, 1]
    assert 0.0 < trainer.callback_metrics["policy/rerouted_fraction"] < 1.0


@case(
    OldLogprobs,
    data={"epochs_per_iteration": 2},
    trainer={"accumulate_grad_batches": 4},  # an epoch is one update
    always=True,
)
def old_logprobs_formula(folder: Path) -> None:
    """Those of the policy before the iteration, of later updates only unless a part reads them, and its entropy."""

    class Reads(Part):
        reads = ("old_logprobs", "entropy")
        stage = Stage.ADAPT

        def prepare(self, rows: Any) -> Any:
            seen.append((rows, self.module.passes.statistics(self.module.policy, rows, entropy=True)))
            return rows

    class Later(Reads):
        reads = ()

    for part, of_all in ((Later(), False), (Reads(), True)):
        seen: list[tuple[Any, Any]] = []
        fit(folder, dataclasses.replace(CASES["OldLogprobs"], data={}, trainer={}), parts=[part])  # one epoch
        assert len(seen) == 2
        for rows, expected in seen:
            chosen = rows.update >= 0 if of_all else rows.update > 0
            wanted = rows.action_mask & chosen[:, None]
            assert 0 < wanted.sum() <= rows.action_mask.sum()
            assert torch.equal(rows.old_logprobs, expected.logprobs.where(wanted, 0.0))
            assert ("entropy" in rows.columns) == of_all
            if of_all:
                assert torch.equal(rows.columns["entropy"], expected.entropy)


@case(
    partial(StopEarly, 1e-6),
    metrics=("policy/kl_early_stopped",),
    trainer={"accumulate_grad_batches": 1, "max_epochs": 1},  # of four updates it stops after the first
)
def stop_early_formula(folder: Path) -> None:
    """Updates stop where the distance passes the limit, and begin again with the next iteration; the critic goes on."""
    watch = Watch()
    trainer, _, _ = fit_run(
        folder,
        module=PPOModule,
        module_arguments={"lr": 1e-3, "parts": [StopEarly(LIMIT)], "optimization": {"weight_decay": 0.1}},
        data_arguments={"rollout_batch_size": 8, "micro_batch_size": 4},  # four updates of two micro-batches
        callbacks=[watch],
    )
    skipped: list[bool] = []
    for number in range(8):
        (before, moments, critic, samples), (after, later_moments, later_critic, _) = watch.seen[number : number + 2]
        start = watch.seen[number // 4 * 4][0]
        with torch.no_grad():
            moved = torch.cat(
                [completion_logprobs(before, sample) - completion_logprobs(start, sample) for sample in samples]
            )
        distance = float((moved.exp() - 1 - moved).mean())  # k3 of old to new
        assert abs(distance / LIMIT - 1) > 0.01  # no tie that rounding decides
        skipped.append(distance > LIMIT or (number % 4 > 0 and skipped[-1]))
        assert torch.equal(flat(before.parameters()), flat(after.parameters())) == skipped[-1], (number, distance)
        assert not skipped[-1] or torch.equal(moments, later_moments)
        assert not torch.equal(critic, later_critic)
    assert skipped[3]
    assert skipped[7]
    assert skipped.count(False) >= 3
    assert trainer.global_step == 8  # steps are counted, whoever took part
    assert float(trainer.callback_metrics["policy/kl_early_stopped"]) == pytest.approx(sum(skipped[4:]) / 4)


@case(partial(KLTarget, 1e-3, horizon=100), module={"kl_coef": 0.1}, metrics=("policy/kl_coef",))
def kl_target_formula(folder: Path) -> None:
    """The coefficient moves towards its target by the rule of Ziegler et al., and is remembered."""
    seen: list[tuple[float, float]] = []

    def coefficient(module: Any) -> float:
        return next(part.coef for part in module.parts if isinstance(part, KLPenalty))

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


penalty = partial(KLPenalty, 0.5, estimator="k2", clamp=0.1, importance_weight=True)
in_reward = partial(KLInReward, 0.5, place="sequence", estimator="k3")


@case(penalty, metrics=("policy/ref_kl",))
def kl_penalty_formula(folder: Path) -> None:
    """Ratio times k2, at most 0.1 of each token, as a share of the step's mean."""
    part, rows = attached(penalty()), experience()
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


@case(in_reward, module=UNSCALED, metrics=("policy/ref_kl",))
def kl_in_reward_formula(folder: Path) -> None:
    """The sum of an answer's KL, or that of each token as a column; k3 of the policy before the iteration."""
    rows = experience()
    difference = rows.columns["ref_logprobs"] - rows.old_logprobs
    kl = torch.where(rows.action_mask, difference.exp() - 1 - difference, 0.0)
    torch.testing.assert_close(attached(in_reward()).prepare(rows).rewards, rows.rewards - 0.5 * kl.sum(-1))
    of_tokens = KLInReward(0.5, place="token", estimator="k3")
    PPOModule("no/model", parts=[of_tokens])
    found = of_tokens.prepare(rows)
    assert found.rewards is rows.rewards
    torch.testing.assert_close(found.columns["token_penalty"], 0.5 * kl)
