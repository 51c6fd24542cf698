"""GRPO and its special cases DAPO, BNPO and Dr.GRPO, and the KL penalty beside them."""

import pytest
import torch

from rlhfkit.losses import (
    aggregate,
    bnpo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    kl_estimate,
    kl_loss,
    ppo_loss,
    sum_losses,
)
from rlhfkit.losses.policy.base import policy_tokens

from ..policy_cases import gradient, policy_batch


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean"])
def test_grpo_is_ppo_plus_aggregated_kl(estimator, aggregation):
    batch = policy_batch()
    ref = batch.old_logprobs - 0.1
    penalty = kl_loss(batch.logprobs, ref, batch.mask, coef=0.3, estimator=estimator, aggregation=aggregation)
    got = sum_losses(grpo_loss(*batch, aggregation=aggregation), penalty)
    kl = kl_estimate(batch.logprobs, ref, estimator=estimator)
    expected = ppo_loss(*batch, aggregation=aggregation).loss + 0.3 * aggregate(kl, batch.mask, aggregation)
    torch.testing.assert_close(got.loss, expected)
    torch.testing.assert_close(got.metrics["policy/ref_kl"], kl[batch.mask].mean())


def test_a_kl_above_the_clamp_counts_as_the_clamp_and_has_no_gradient():
    batch = policy_batch().leaf()
    ref = batch.old_logprobs.detach() - 100.0
    got = sum_losses(grpo_loss(*batch), kl_loss(batch.logprobs, ref, batch.mask, coef=0.3, clamp=10.0))
    assert got.metrics["policy/ref_kl"].item() == pytest.approx(10.0)
    assert torch.equal(gradient(got.loss, batch.logprobs), gradient(grpo_loss(*batch).loss, batch.logprobs))


def test_the_gradient_of_grpo_in_bfloat16_is_rounded_once():
    batch = policy_batch(batch=16, steps=64, dtype=torch.bfloat16)
    reference = batch.old_logprobs.float() + 0.3

    def gradient_in(dtype):
        logprobs = batch.logprobs.to(dtype).requires_grad_()
        now = logprobs.float()  # once for both terms, so that their gradients are rounded once
        penalty = kl_loss(now, reference, batch.mask, coef=0.5, importance_weight=policy_tokens(now, *batch[1:]).ratio)
        return gradient(sum_losses(grpo_loss(now, *batch[1:]), penalty).loss, logprobs)

    exact = gradient_in(torch.float32)
    assert torch.equal(gradient_in(torch.bfloat16), exact.bfloat16())


def test_reference_logprobs_without_a_coefficient_are_measured_and_do_not_train():
    batch = policy_batch().leaf()
    # An infinite reference shows in the metric; 0 * inf in the loss would be nan.
    plain, reference = grpo_loss(*batch), torch.full_like(batch.old_logprobs, 1e4)
    got = sum_losses(plain, kl_loss(batch.logprobs, reference, batch.mask, coef=0.0, estimator="k2"))
    assert got.loss.item() == plain.loss.item()
    assert got.metrics["policy/ref_kl"].item() > 1e7
    assert torch.equal(gradient(got.loss, batch.logprobs), gradient(plain.loss, batch.logprobs))


def test_special_cases_differ_from_grpo_as_published():
    batch = policy_batch()
    assert torch.equal(dapo_loss(*batch).loss, ppo_loss(*batch, clip_high=0.28).loss)
    assert torch.equal(bnpo_loss(*batch).loss, ppo_loss(*batch).loss)
    total = ppo_loss(*batch, denominator=1.0).loss
    torch.testing.assert_close(dr_grpo_loss(*batch, max_length=100).loss, total / 500)


def test_length_of_an_answer_does_not_scale_its_gradient_in_dr_grpo_and_does_in_grpo():
    logprobs = torch.zeros(1, 8, dtype=torch.float64, requires_grad=True)
    for length in (2, 8):
        inputs = logprobs, logprobs.detach(), torch.ones(1), torch.arange(8)[None] < length
        constant = gradient(dr_grpo_loss(*inputs, max_length=8).loss, logprobs)[0, 0]
        assert constant.item() == pytest.approx(-1 / 8)
        assert gradient(grpo_loss(*inputs).loss, logprobs)[0, 0].item() == pytest.approx(-1 / length)


def test_a_reference_of_another_shape_is_refused():
    batch = policy_batch()
    with pytest.raises(ValueError, match="same shape"):
        kl_loss(batch.logprobs, torch.zeros(5, 6), batch.mask, coef=0.1)
