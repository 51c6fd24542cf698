"""Losses with one ratio for a sequence; their values are golden (``test_golden.py``)."""

import torch

from rlhfkit.losses import gmpo_loss, gspo_loss, gspo_token_loss, vespo_loss

from ..policy_cases import gradient, policy_batch


def test_gspo_token_gives_each_token_its_own_advantage():
    batch = policy_batch().leaf()
    got = gradient(gspo_token_loss(*batch, clip_low=1.0, clip_high=1e9, denominator=1.0).loss, batch.logprobs)
    log_ratio = torch.where(batch.mask, (batch.logprobs - batch.old_logprobs).detach(), 0.0)
    count = batch.mask.sum(-1, keepdim=True)
    expected = -(log_ratio.sum(-1, keepdim=True) / count).exp() * batch.advantages * batch.mask / count
    torch.testing.assert_close(got, expected)


def test_gspo_clips_at_the_distances_of_its_paper():
    ratio = torch.tensor([1 - 3.1e-4, 1 - 2.9e-4, 1 + 3.9e-4, 1 + 4.1e-4], dtype=torch.float64)
    logprobs, advantages = ratio.log()[:, None].requires_grad_(), torch.tensor([[-1.0], [-1.0], [1.0], [1.0]])
    loss = gspo_loss(logprobs, torch.zeros_like(logprobs), advantages, torch.ones(4, 1)).loss
    assert (gradient(loss, logprobs)[:, 0] != 0).tolist() == [False, True, True, False]


def test_gmpo_counts_the_tokens_that_its_bounds_hold():
    log_ratio = torch.tensor([[1.0, -1.0, -1.0, 0.3]])
    for advantage, low, high in ((1.0, 0.0, 0.25), (-1.0, 0.5, 0.0)):
        metrics = gmpo_loss(log_ratio, torch.zeros(1, 4), torch.tensor([advantage]), torch.ones(1, 4)).metrics
        assert (metrics["policy/clip_fraction_low"], metrics["policy/clip_fraction_high"]) == (low, high)


def test_weights_of_vespo_multiply_over_a_sequence_and_a_mask_takes_its_tokens_out_and_leaves_the_kernel():
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
    each = torch.ones(5, 7).double()
    each[:, 0] = torch.rand(5)
    of_tokens, *of_sequences = (
        gradient(vespo_loss(*batch, weights=weights, denominator=1.0).loss, batch.logprobs)
        for weights in (each, each[:, 0], each[:, :1])
    )
    for one in of_sequences:
        torch.testing.assert_close(one, of_tokens)
