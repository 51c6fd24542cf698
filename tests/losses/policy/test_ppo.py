"""PPO's clipped surrogate against closed forms."""

import math

import pytest
import torch

from rlhfkit.losses import ppo_loss

from ..policy_cases import gradient, policy_batch

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0, 5.0]], dtype=torch.float64)


def at_ratios(advantage, **knobs):
    """Loss and gradient of each of six tokens, one by one, at log-prob 0 under the policy."""
    logprobs = torch.zeros_like(RATIOS).requires_grad_()
    old = -RATIOS.log()
    losses, gradients = [], []
    for token in range(6):
        mask = torch.arange(6)[None] == token
        loss = ppo_loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), mask, **knobs).loss
        losses.append(loss.item())
        gradients.append(gradient(loss, logprobs)[0, token].item())
    return losses, gradients


def test_clip_by_hand():
    losses, gradients = at_ratios(1.0, clip_high=0.3)
    assert losses == pytest.approx([-0.5, -0.9, -1.0, -1.1, -1.3, -1.3])
    assert gradients == pytest.approx([-0.5, -0.9, -1.0, -1.1, 0.0, 0.0])
    losses, gradients = at_ratios(-2.0, clip_low=0.3)
    assert losses == pytest.approx([1.4, 1.8, 2.0, 2.2, 4.0, 10.0])
    assert gradients == pytest.approx([0.0, 1.8, 2.0, 2.2, 4.0, 10.0])


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    assert at_ratios(-2.0, dual_clip=3.0)[0] == pytest.approx([1.6, 1.8, 2.0, 2.2, 4.0, 6.0])
    assert at_ratios(-2.0, dual_clip=3.0)[1][-1] == 0.0
    assert at_ratios(1.0, dual_clip=3.0) == at_ratios(1.0)


def test_dual_clip_fraction_counts_the_tokens_whose_loss_it_bounds():
    def measured(advantage, **knobs):
        inputs = torch.zeros_like(RATIOS), -RATIOS.log(), torch.tensor([advantage]), torch.ones_like(RATIOS)
        return ppo_loss(*inputs, **knobs).metrics

    assert measured(-2.0, dual_clip=1.5)["policy/dual_clip_fraction"].item() == pytest.approx(2 / 6)
    assert measured(2.0, dual_clip=1.5)["policy/dual_clip_fraction"].item() == 0.0
    assert "policy/dual_clip_fraction" not in measured(-2.0)


def test_delta_bounds_the_unclipped_ratio():
    losses, gradients = at_ratios(-1.0, delta=1.5)
    assert losses == pytest.approx([0.8, 0.9, 1.0, 1.1, 1.5, 1.5])
    assert gradients[-2:] == [0.0, 0.0]


def test_log_ratio_clamp_takes_effect_and_can_be_off():
    logprobs, old = torch.tensor([[-30.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    inputs = -logprobs, old, -torch.ones(1), torch.ones(1, 1)
    assert ppo_loss(*inputs).loss.item() == pytest.approx(math.exp(20))
    assert ppo_loss(*inputs, log_ratio_clamp=2.0).loss.item() == pytest.approx(math.exp(2))
    assert ppo_loss(*inputs, log_ratio_clamp=None).loss.item() == pytest.approx(math.exp(30))


def test_the_first_update_of_an_iteration_has_ratio_exactly_one():
    batch = policy_batch(dtype=torch.float32)
    metrics = ppo_loss(batch.logprobs, batch.logprobs.detach(), *batch[2:]).metrics
    assert metrics["policy/ratio_mean"].item() == metrics["policy/ratio_max"].item() == 1.0
    assert metrics["policy/approx_kl"].item() == metrics["policy/clip_fraction"].item() == 0.0
