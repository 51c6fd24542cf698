"""Modules train with gradients that the output layer computes in the forward pass, where their loss allows it.

Covers base.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from models.test_forward import experience
from models.test_output_logits import texts
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import DFTModule, DPOModule, GRPOModule, PPOModule, SFTModule, SimPOModule
from rlhfkit.data import Experience, TokenBatch
from rlhfkit.data.formats.preferences import PreferenceBatch, PreferenceExample, collate_preferences
from rlhfkit.losses import LossOutput, cross_entropy_loss, gradient_scope
from rlhfkit.losses.fused_head import tiles
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.base import PolicyModule


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def for_tiny_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyModule, "head_loss_vocabulary", 0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles._BLOCK_BYTES, "cpu", 6 * 128 * 4)


def rollouts(*, first_update: bool) -> Experience:
    """Four samples of an iteration, prepared."""
    batch = experience([(3, 5), (7, 1), (1, 9), (4, 4)])
    shape = batch.action_mask.shape
    generator = torch.Generator().manual_seed(4)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator)

    mean = torch.where(batch.action_mask, -5.0, 0.0)
    return dataclasses.replace(
        batch,
        advantages=noise(1.0),
        rollout_logprobs=mean + noise(0.3),
        ref_logprobs=mean + noise(0.3),
        old_logprobs=None if first_update else mean + noise(0.3),
        values=noise(0.1),
        returns=noise(0.5),
        step_tokens=40.0,
        step_sequences=9.0,
        step_micro_batches=2,
    )


def pairs() -> PreferenceBatch:
    """Two pairs with reference log-probs."""
    examples = [
        PreferenceExample.from_token_ids([3, 4, 5], [20, 21], [22]),
        PreferenceExample.from_token_ids([6, 7], [8, 9, 10, 11], [12, 13]),
    ]
    return dataclasses.replace(collate_preferences(examples), ref_logprobs=torch.tensor([-9.0, -5.0, -20.0, -9.0]))


def step(module: Any, batch: Any) -> tuple[float, list[Tensor], bool]:
    """Loss, gradients, and whether the output layer computed them in the forward pass."""
    module.configure_model()
    outputs: list[PolicyOutput] = []
    module.training_output = lambda batch: outputs.append(type(module).training_output(module, batch)) or outputs[-1]
    module.zero_grad()
    loss = module.training_step(batch, 0)
    loss.backward()
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return float(loss.detach()), found, outputs[0].head_gradient is not None


def compare(module: Any, batch: Any, *, single: bool = True) -> None:
    """A step gives the loss and gradients of a step whose backward pass goes through the output layer."""
    loss, gradients, used = step(module, batch)
    assert used == single
    module.loss_gradient_scope = lambda batch: None
    expected, wanted, used = step(module, batch)
    assert not used
    # float32: tiles of another shape round differently, by a few units in the last place of each log-prob.
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(gradients) == len(wanted) > 0
    for mine, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("kind", [SFTModule, DFTModule])
def test_supervised_fine_tuning(model: str, kind: Any, small_blocks: None) -> None:
    compare(kind(model), texts())


ON_POLICY: dict[str, tuple[dict[str, Any], bool, bool]] = {
    # arguments of the module, whether the first update and whether later ones have one pass in blocks of tokens
    "grpo": ({}, True, True),
    "kl and entropy in the loss": ({"kl_coef": 0.1, "entropy_coef": 0.1}, True, True),
    "no entropy": ({"log_entropy": False}, True, True),
    "tis": ({"correction": "tis"}, True, True),
    "mis": ({"correction": "mis"}, False, True),
    "gspo": ({"policy_loss": "gspo_loss"}, True, False),
    "ppo on sequences": (
        {"policy_loss": "ppo_loss", "policy_loss_arguments": {"ratio_level": "sequence"}},
        True,
        False,
    ),
    "cispo": ({"policy_loss": "cispo_loss"}, True, True),
    "kl_cov": ({"policy_loss": "kl_cov_loss"}, False, False),
    "clip_cov": ({"policy_loss": "clip_cov_loss"}, False, False),
}


@pytest.mark.parametrize("first_update", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", ON_POLICY)
def test_updates_on_policy(model: str, name: str, first_update: bool, small_blocks: None) -> None:
    arguments, first, later = ON_POLICY[name]
    if name == "clip_cov":  # its draw would differ
        module = GRPOModule(model, **arguments)
        assert module.loss_gradient_scope(rollouts(first_update=first_update)) is None
        return
    compare(
        GRPOModule(model, **arguments), rollouts(first_update=first_update), single=first if first_update else later
    )


def test_losses_of_sequences_in_one_block(model: str) -> None:
    compare(GRPOModule(model, policy_loss="gspo_loss"), rollouts(first_update=False))
    compare(GRPOModule(model, correction="mis"), rollouts(first_update=True))


@pytest.mark.parametrize("shared", [True, False])
def test_policy_and_critic(model: str, shared: bool, small_blocks: None) -> None:
    compare(PPOModule(model, kl_coef=0.0, shared_backbone=shared), rollouts(first_update=not shared))


@pytest.mark.parametrize("one_block", [True, False])
def test_preference_pairs(model: str, one_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_block:
        monkeypatch.setitem(tiles._BLOCK_BYTES, "cpu", 6 * 128 * 4)
    compare(SimPOModule(model), pairs(), single=one_block)
    compare(DPOModule(model, loss_type={"sigmoid": 1.0, "sft": 0.2}), pairs(), single=one_block)
    assert DPOModule(model, use_weighting=True).loss_gradient_scope(pairs()) is None
    assert DPOModule(model, loss_type=lambda pairs: -pairs.margin).loss_gradient_scope(pairs()) is None


class OwnLoss(SFTModule):
    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        assert out.head_gradient is None
        weights = 1 - out.logprobs.detach().exp()
        return cross_entropy_loss(weights * out.logprobs, batch.loss_mask, denominator=batch.token_denominator)


class MarkedLoss(OwnLoss):
    @gradient_scope("token")
    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        return OwnLoss.loss(self, batch, out._replace(head_gradient=None))


class OwnTrainingStep(SFTModule):
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        out = self.training_output(batch)
        assert out.logprobs.requires_grad
        return 2 * self.loss(batch, out).loss


class OwnOutput(SFTModule):
    def policy_output(self, batch: TokenBatch) -> PolicyOutput:  # type: ignore[override]  # written before head_loss
        out = super().policy_output(batch)
        return out._replace(logprobs=0.5 * out.logprobs)


class HalfOfIt(GRPOModule):
    def total_loss(self, batch: Experience, out: PolicyOutput) -> LossOutput:
        return LossOutput(0.5 * self.loss(batch, out).loss, {})


def test_overrides_are_trained_as_ever_unless_they_are_marked(model: str, small_blocks: None) -> None:
    compare(OwnLoss(model), texts(), single=False)
    compare(MarkedLoss(model), texts(), single=True)
    compare(OwnTrainingStep(model), texts(), single=False)
    compare(OwnOutput(model), texts(), single=False)
    compare(HalfOfIt(model), rollouts(first_update=True), single=False)


def test_validation_and_steps_without_gradients_do_without(model: str) -> None:
    module = SFTModule(model)
    module.configure_model()
    with torch.no_grad():
        assert module.head_loss(texts()) is None
        assert module.training_output(texts()).head_gradient is None
    assert module.policy_output(texts()).logprobs.requires_grad


def test_small_vocabularies_keep_the_ordinary_gradients(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SFTModule(model)
    monkeypatch.setattr(PolicyModule, "head_loss_vocabulary", (module.vocabulary_size or 0) + 1)
    assert module.head_loss(texts()) is None
    monkeypatch.setattr(PolicyModule, "head_loss_vocabulary", module.vocabulary_size)
    assert module.head_loss(texts()) is not None
