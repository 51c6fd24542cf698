"""PPO's clipped surrogate against closed forms."""

import math

import pytest
import torch

from rlhfkit.losses import ppo_loss

from ..policy_cases import policy_batch

RATIOS = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0, 5.0]], dtype=torch.float64)


def test_dual_clip_fraction_counts_the_tokens_whose_loss_it_bounds():
    def measured(advantage, **knobs):
        inputs = torch.zeros_like(RATIOS), -RATIOS.log(), torch.tensor([advantage]), torch.ones_like(RATIOS)
        return ppo_loss(*inputs, **knobs).metrics

    assert measured(-2.0, dual_clip=1.5)["policy/dual_clip_fraction"].item() == pytest.approx(2 / 6)
    assert measured(2.0, dual_clip=1.5)["policy/dual_clip_fraction"].item() == 0.0
    assert "policy/dual_clip_fraction" not in measured(-2.0)


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
