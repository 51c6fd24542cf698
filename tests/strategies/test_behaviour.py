"""Precision, evaluation without fit, dropped gradients and manual optimization at every ZeRO stage, on two ranks.

Covers strategies/strategy.py, deepspeed/precision.py and deepspeed/gradients.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from strategies import toys
from strategies.parity_cases import RANK, RANKS, check_equal, difference, fit
from strategies.ranks import on_two_ranks

STAGES = range(4)


@on_two_ranks
def test_bf16_stays_near_fp32(folder: Path, model: str) -> None:
    """The weights are in bf16; ``mixed`` means the same."""
    exact = fit(toys.Toy(model, reference=True), "rlhf_zero2")
    for stage, kind in [*((stage, "bf16-true") for stage in STAGES), (3, "bf16-mixed")]:
        rounded = fit(toys.Toy(model, reference=True), f"rlhf_zero{stage}", precision=kind)
        # bf16 has 8 bits: weights of 0.1 round by up to 4e-4, and losses of about 4 moved by 2.3e-3 at most in 4 steps.
        assert 0 < difference(exact.losses, rounded.losses) < 5e-3, (stage, kind)
        assert {weight.dtype for weight in rounded.weights.values()} <= {torch.bfloat16}, (stage, kind)
        assert rounded.weights or RANK > 0


class Seen(toys.Toy):
    """Notes what a batch looks like when it arrives."""

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen = {name: value.dtype for name, value in batch.items()}
        self.seen["rotary"] = self.policy.module.model.rotary_emb.inv_freq.dtype
        return super().training_step(batch["tokens"], index)


@on_two_ranks
def test_batches_and_buffers_keep_their_dtypes_under_bf16(folder: Path, model: str) -> None:
    """Neither old log-probs nor rotary frequencies are rounded."""
    batch = {"tokens": toys.global_batches(1)[0], "rewards": torch.ones(8), "old": torch.ones(8, dtype=torch.float64)}
    module = Seen(model)
    toys.trainer("rlhf_zero2", RANKS, precision="bf16-true").fit(module, DataLoader([batch], batch_size=None))
    expected = {"tokens": torch.int64, "rewards": torch.float32, "old": torch.float64, "rotary": torch.float32}
    assert module.seen == expected, module.seen


@on_two_ranks
def test_validation_before_between_and_after_fits_of_one_module(folder: Path, model: str) -> None:
    """Equals that of plain Lightning; at stage 1 each rank has whole weights, as at 2."""

    def validated(strategy: str, rank: int, ranks: int) -> list[float]:
        module, shares = toys.Toy(model, reference=True), toys.ShareLoader(toys.global_batches(2), rank, ranks)
        losses = []
        for fits in range(3):
            if fits:
                toys.trainer(strategy, ranks).fit(module, shares)
            (values,) = toys.trainer(strategy, ranks).validate(module, shares, verbose=False)
            losses.append(values["validation_loss"])
        return losses

    expected = validated("auto", 0, 1)
    assert expected[0] - expected[-1] > 0.1, "it must have learnt, else equality shows nothing"
    for stage in (0, 2, 3):
        assert validated(f"rlhf_zero{stage}", RANK, RANKS) == pytest.approx(expected, abs=1e-6), stage


class Dropping(toys.Toy):
    """Manual optimization: in step 1 a gradient is computed and thrown away before the real one."""

    waste = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer = self.optimizers()
        if index == 1 and self.waste:
            self.manual_backward(100 * self.policy_loss(batch.flip(0)))
            optimizer.zero_grad()
        loss = self.policy_loss(batch)
        self.losses.append(self.mean_over_ranks(loss))
        self.manual_backward(loss)
        optimizer.step()


@on_two_ranks
def test_zero_grad_drops_gradients_that_were_reduced_already(folder: Path, model: str) -> None:
    """Against runs that never computed them; in 16 bits stages 1 and 2 keep gradients where they do in 32."""
    for stage, kind in [*((stage, "32-true") for stage in STAGES), (0, "bf16-true"), (3, "bf16-true")]:
        dropping, straight = Dropping(model, optimizer="sgd"), Dropping(model, optimizer="sgd")
        straight.waste = False
        runs = [fit(module, f"rlhf_zero{stage}", precision=kind) for module in (dropping, straight)]
        check_equal(*runs, f"stage {stage}, {kind}")


class TwoOptimizers(toys.Toy):
    """Manual optimization: an optimizer, a window and a clipping value for each child."""

    def __init__(self, model: str) -> None:
        super().__init__(model, optimizer="sgd", critic=True)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.policy.parameters(), lr=0.5), torch.optim.SGD(self.critic.parameters(), lr=0.1)]

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        policy, critic = self.optimizers()
        loss = self.policy_loss(batch)
        self.losses.append(self.mean_over_ranks(loss))
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(policy, gradient_clip_val=0.3)
            policy.step()
            policy.zero_grad()
        self.manual_backward((self.critic(batch) - batch / toys.VOCABULARY).square().mean())
        critic.step()
        critic.zero_grad()


@on_two_ranks
def test_several_optimizers_with_manual_optimization_equal_plain_lightning(folder: Path, model: str) -> None:
    """At every stage."""
    expected = fit(TwoOptimizers(model), "auto")
    for stage in STAGES:
        check_equal(fit(TwoOptimizers(model), f"rlhf_zero{stage}"), expected, f"stage {stage}", 1e-6)
