"""XPO's bonus and Nash-MD's gradient against closed forms over all answers of a small policy.

Covers self_play.py.
"""

import pytest
import torch

from rlhfkit.losses import exploration_loss, nash_md_loss, preference_advantages


def test_the_bonus_is_the_mean_log_prob_of_what_counts() -> None:
    logps = torch.tensor([-3.0, float("nan"), -5.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    output = exploration_loss(logps, alpha=0.25, mask=mask)
    assert float(output.loss.detach()) == pytest.approx(0.25 * -4.0)
    assert float(output.metrics["exploration/logps"]) == pytest.approx(-4.0)
    output.loss.backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [0.125, 0.0, 0.125]
    split = [exploration_loss(logps[i : i + 1], alpha=0.25, denominator=2 / 2).loss.detach() for i in (0, 2)]
    assert float(sum(split)) / 2 == pytest.approx(float(output.loss.detach()))


def test_nash_md_is_the_gradient_of_preference_less_divergence() -> None:
    """Expectation over all answers of the estimate = gradient of ``E[P] - 1/2 - β KL(π, π_ref)``, computed by hand."""
    generator, beta = torch.Generator().manual_seed(0), 0.3
    logits = torch.randn(6, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    beats = torch.rand(6, 6, dtype=torch.float64, generator=generator)
    policy = logits.log_softmax(-1)
    mixture = (0.5 * policy + 0.5 * reference).detach().softmax(-1)
    exact = policy.exp() @ beats @ mixture - beta * (policy.exp() * (policy - reference)).sum()
    [expected] = torch.autograd.grad(exact, logits, retain_graph=True)
    found = torch.zeros(6, dtype=torch.float64)
    for answer in range(6):
        for other in range(6):
            chance = policy[answer].exp() * mixture[other]
            better = (beats[answer, other] - 0.5).reshape(1)
            one = nash_md_loss(policy[answer].reshape(1), reference[answer].reshape(1), better, beta=beta)
            found += chance.detach() * torch.autograd.grad(one.loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(-found, expected, rtol=1e-10, atol=1e-12)


def test_masked_answers_reach_neither_loss_nor_metrics_of_nash_md() -> None:
    nan = float("nan")
    logps = torch.tensor([-2.0, nan, -1.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    output = nash_md_loss(logps, torch.tensor([-1.0, nan, -3.0]), torch.tensor([0.5, nan, -0.5]), beta=0.1, mask=mask)
    assert float(output.loss.detach()) == pytest.approx((2.0 * (0.5 + 0.1) + 1.0 * (-0.5 - 0.2)) / 2)
    assert float(output.metrics["nash/preference"]) == pytest.approx(0.5)
    assert float(output.metrics["nash/log_ratio"]) == pytest.approx(0.5)
    output.loss.backward()
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, torch.tensor([-0.3, 0.0, 0.35]))


def test_preferences_are_those_between_the_two_samplers_of_a_prompt() -> None:
    nan = float("nan")
    rewards = torch.tensor([1.0, 0.25, 0.5, 0.5, nan, 1.0, 0.0, nan, 0.75, 0.0, 0.5])
    group = torch.tensor([4, 4, 7, 7, 8, 8, 9, 9, 1, 1, 1])
    ours = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0]).bool()
    found = preference_advantages(rewards, group, ours)
    expected = torch.tensor([0.375, nan, 0.0, nan, nan, nan, nan, nan, 0.25, nan, nan])
    torch.testing.assert_close(found, expected, equal_nan=True)
    scores = preference_advantages(10 * rewards[:2], group[:2], ours[:2], link="bradley-terry")
    assert float(scores[0]) == pytest.approx(1 / (1 + torch.tensor(-7.5).exp().item()) - 0.5)
    with pytest.raises(ValueError, match="win rates are in"):
        preference_advantages(10 * rewards, group, ours)
    with pytest.raises(ValueError, match="link must be one of"):
        preference_advantages(rewards, group, ours, link="elo")  # type: ignore[arg-type]


def test_numbers_out_of_range_are_refused() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="alpha must not be negative"):
        exploration_loss(one, alpha=-1.0)
    with pytest.raises(ValueError, match="beta must not be negative"):
        nash_md_loss(one, one, one, beta=-1.0)
