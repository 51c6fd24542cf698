import pytest
import torch

from rlhfkit.losses import importance_weights, ppo_loss, reinforce_loss, sapo_loss

from ..policy_cases import gradient


def test_reinforce_estimates_the_gradient_of_the_expected_reward():
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reward = torch.randn(6, dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    expected = gradient(-(logprobs.exp() * reward).sum(), logits)
    # All six one-token answers, each weighted with its probability.
    inputs = logprobs[:, None], logprobs[:, None], reward, torch.ones(6, 1)
    loss = reinforce_loss(*inputs, weights=logprobs.exp(), denominator=1.0).loss
    torch.testing.assert_close(gradient(loss, logits), expected)


def test_reinforce_with_importance_weights_is_unbiased_off_policy():
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    behaviour, reward = torch.randn(6, dtype=torch.float64).log_softmax(-1), torch.randn(6, dtype=torch.float64)
    logprobs, mask = logits.log_softmax(-1), torch.ones(6, 1)
    expected = gradient(-(logprobs.exp() * reward).sum(), logits)
    correction = importance_weights(logprobs[:, None], behaviour[:, None], mask, mode="none", high=None)
    weights = correction.weights[:, 0] * behaviour.exp()
    inputs = logprobs[:, None], behaviour[:, None], reward, mask
    loss = reinforce_loss(*inputs, weights=weights, denominator=1.0).loss
    torch.testing.assert_close(gradient(loss, logits), expected)


def test_sapo_gate_is_ppo_at_ratio_one_and_fades_on_both_sides():
    old = torch.tensor([[0.0, 3.0, -3.0]], dtype=torch.float64) - 1.0
    logprobs = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        inputs = logprobs, old, torch.tensor([sign], dtype=torch.float64), torch.ones(1, 3)
        soft = gradient(sapo_loss(*inputs).loss, logprobs)[0]
        plain = gradient(ppo_loss(*inputs, clip_low=1.0, clip_high=1e9, aggregation="token-mean").loss, logprobs)[0]
        assert soft[0].item() == pytest.approx(plain[0].item())
        assert (soft[1:] / plain[1:]).max().item() < 0.85
    # A larger temperature fades faster: negative updates are held tighter.
    inputs = logprobs, old, torch.tensor([-1.0], dtype=torch.float64), torch.ones(1, 3)
    tight = gradient(sapo_loss(*inputs, temperature_negative=3.0).loss, logprobs)[0]
    assert (tight[1:].abs() < gradient(sapo_loss(*inputs).loss, logprobs)[0][1:].abs()).all()
