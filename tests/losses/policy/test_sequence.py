"""Losses with one ratio for a sequence; their values are golden (``test_golden.py``)."""

import math

import pytest
import torch

from rlhfkit.losses import gmpo_loss, gspo_token_loss, vespo_loss

from ..policy_cases import TRL, gradient, policy_batch, tensors


def test_gspo_token_gives_each_token_its_own_advantage():
    batch = policy_batch().leaf()
    got = gradient(gspo_token_loss(*batch, clip_low=1.0, clip_high=1e9, denominator=1.0).loss, batch.logprobs)
    log_ratio = torch.where(batch.mask, (batch.logprobs - batch.old_logprobs).detach(), 0.0)
    count = batch.mask.sum(-1, keepdim=True)
    expected = -(log_ratio.sum(-1, keepdim=True) / count).exp() * batch.advantages * batch.mask / count
    torch.testing.assert_close(got, expected)


def test_gmpo_clips_tokens_in_log_space_on_the_pessimistic_side():
    old = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    logprobs = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)  # log-ratios 1 and -1
    for advantage, expected in ((1.0, (0.4 - 1.0) / 2), (-1.0, (1.0 - 0.4) / 2)):
        output = gmpo_loss(logprobs, old, torch.tensor([advantage]), torch.ones(1, 2))
        assert output.loss.item() == pytest.approx(-advantage * math.exp(expected))
        assert output.metrics[f"policy/clip_fraction_{'high' if advantage > 0 else 'low'}"].item() == 0.5
        clipped_token = 0 if advantage > 0 else 1
        assert gradient(output.loss, logprobs)[0, clipped_token].item() == 0.0


def test_vespo_kernel_matches_trl():
    inputs, helper = tensors(TRL["grpo_loss"]["inputs"]), TRL["helpers"]["gamma_weights"]
    mask = inputs["completion_mask"]
    leaf = inputs["per_token_logps"].requires_grad_()
    batch = leaf, inputs["old_per_token_logps"], inputs["advantages"], mask
    got = gradient(vespo_loss(*batch, denominator=1.0).loss, leaf)
    expected = -torch.tensor(helper["out"], dtype=torch.float64) * inputs["advantages"][:, None] * mask
    torch.testing.assert_close(got, expected)
    for weights in (inputs["importance_sampling_ratio_sequence"], inputs["importance_sampling_ratio_sequence"][:, 0]):
        by_sequence = gradient(vespo_loss(*batch, weights=weights, denominator=1.0).loss, leaf)
        with_weight = -torch.tensor(helper["out_with_is"], dtype=torch.float64) * inputs["advantages"][:, None] * mask
        torch.testing.assert_close(by_sequence, with_weight)


def test_a_mask_as_weights_takes_its_tokens_out_of_vespo_and_leaves_the_kernel():
    batch = policy_batch()
    batch = batch._replace(advantages=batch.advantages[:, 0]).leaf()
    keep = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[0] = False  # nothing left of a sequence
    plain = gradient(vespo_loss(*batch, denominator=1.0).loss, batch.logprobs)
    masked = vespo_loss(*batch, weights=keep.double(), denominator=1.0)
    torch.testing.assert_close(gradient(masked.loss, batch.logprobs), plain * keep)
    assert plain[keep].abs().sum() > 0
    weighted = 1.3 * keep.double()
    some, all_of_them = (
        gradient(vespo_loss(*batch, weights=weights, denominator=1.0).loss, batch.logprobs)
        for weights in (weighted, torch.where(keep, weighted, 1.0))
    )
    torch.testing.assert_close(some, all_of_them * keep)
