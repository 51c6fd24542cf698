"""PPO's clipped surrogate against closed forms, and GRPO with its KL penalty; golden values: ``test_golden.py``."""

import math

import pytest
import torch

from rlhfkit.losses import bnpo_loss, dapo_loss, dr_grpo_loss, grpo_loss, kl_loss, ppo_loss, sum_losses

from ..policy_cases import gradient, policy_batch

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0, 5.0]], dtype=torch.float64)


def test_dual_clip_bounds_the_loss_of_tokens_and_counts_them():
    def measured(advantage, **knobs):
        inputs = torch.zeros_like(RATIOS), -RATIOS.log(), torch.tensor([advantage]), torch.ones_like(RATIOS)
        return ppo_loss(*inputs, **knobs)

    bounded = measured(-2.0, dual_clip=1.5)
    assert bounded.loss.item() == pytest.approx(2 * (0.8 + 0.9 + 1.0 + 1.1 + 1.5 + 1.5) / 6)
    assert bounded.metrics["policy/dual_clip_fraction"].item() == pytest.approx(2 / 6)
    assert measured(2.0, dual_clip=1.5).metrics["policy/dual_clip_fraction"].item() == 0.0
    assert "policy/dual_clip_fraction" not in measured(-2.0).metrics


def test_log_ratio_clamp_takes_effect_and_can_be_off():
    logprobs, old = torch.tensor([[-30.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    inputs = -logprobs, old, -torch.ones(1), torch.ones(1, 1)
    assert ppo_loss(*inputs).loss.item() == pytest.approx(math.exp(20))
    assert ppo_loss(*inputs, log_ratio_clamp=2.0).loss.item() == pytest.approx(math.exp(2))
    assert ppo_loss(*inputs, log_ratio_clamp=None).loss.item() == pytest.approx(math.exp(30))


def test_the_first_update_of_an_iteration_has_ratio_exactly_one_and_later_ones_a_kl():
    batch = policy_batch(dtype=torch.float32)
    metrics = ppo_loss(batch.logprobs, batch.logprobs.detach(), *batch[2:]).metrics
    assert metrics["policy/ratio_mean"].item() == metrics["policy/ratio_max"].item() == 1.0
    assert metrics["policy/approx_kl"].item() == metrics["policy/clip_fraction"].item() == 0.0
    moved = ppo_loss(batch.logprobs, batch.logprobs - 0.5, *batch[2:]).metrics
    assert moved["policy/approx_kl"].item() == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)


def test_reference_logprobs_without_a_coefficient_are_measured_and_do_not_train():
    batch = policy_batch().leaf()
    # An infinite reference shows in the metric; 0 * inf in the loss would be nan.
    plain, reference = grpo_loss(*batch), torch.full_like(batch.old_logprobs, 1e4)
    got = sum_losses(plain, kl_loss(batch.logprobs, reference, batch.mask, coef=0.0, estimator="k2"))
    assert got.loss.item() == plain.loss.item()
    assert got.metrics["policy/ref_kl"].item() > 1e7
    assert torch.equal(gradient(got.loss, batch.logprobs), gradient(plain.loss, batch.logprobs))


def test_dapo_clips_higher_than_bnpo_and_the_loss_of_no_sequences_is_zero():
    batch = policy_batch()
    assert torch.equal(dapo_loss(*batch).loss, ppo_loss(*batch, clip_high=0.28).loss)
    assert torch.equal(bnpo_loss(*batch).loss, ppo_loss(*batch).loss)
    assert dr_grpo_loss(*(tensor[:0] for tensor in batch), max_length=3).loss.item() == 0.0
