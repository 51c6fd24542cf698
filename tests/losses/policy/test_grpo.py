"""GRPO and its special cases DAPO, BNPO and Dr.GRPO, and the KL penalty beside them."""

import torch

from rlhfkit.losses import (
    bnpo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    kl_loss,
    ppo_loss,
    sum_losses,
)
from rlhfkit.losses.policy.base import policy_tokens

from ..policy_cases import gradient, policy_batch


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
