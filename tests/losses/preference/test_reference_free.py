import math

import pytest
import torch

from rlhfkit.losses import cpo_loss, orpo_loss, simpo_loss

from ..policy_cases import TRL

GOLDEN = TRL["helpers"]["cpo_orpo"]
CHOSEN, REJECTED, MEAN_CHOSEN, MEAN_REJECTED = (
    torch.tensor(GOLDEN[name], dtype=torch.float64)
    for name in ("chosen_logps_sum", "rejected_logps_sum", "chosen_logps_avg", "rejected_logps_avg")
)
ONES = torch.ones(5, dtype=torch.long)  # averages are sums of answers of one token


def pair_batch():
    """chosen, rejected (summed log-probs), chosen_lengths, rejected_lengths."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -20 * torch.rand(2, 6, generator=generator, dtype=torch.float64) - 0.1
    return (*logprobs, *torch.randint(1, 9, (2, 6), generator=generator))


def per_pair(loss, *tensors, **knobs):
    return torch.stack([loss(*rows, **knobs).loss for rows in zip(*(one.split(1) for one in tensors), strict=True)])


@pytest.mark.parametrize(
    "case",
    GOLDEN["cases"],
    ids=lambda case: f"{case['loss_type']}-ls{case['label_smoothing']}-alpha{case['alpha']}-beta{case['beta']}",
)
def test_value_matches_trl(case):
    chosen, rejected = (CHOSEN, REJECTED) if case["uses"] == "sum" else (MEAN_CHOSEN, MEAN_REJECTED)
    knobs = {"beta": case["beta"], "label_smoothing": case["label_smoothing"], "nll_coef": 0.0}
    if case["loss_type"] == "simpo":
        loss, knobs = simpo_loss, knobs | {"gamma": case["simpo_gamma"], "alpha": case["alpha"]}
    else:
        loss, knobs = cpo_loss, knobs | {"loss_type": case["loss_type"]}
    losses = per_pair(loss, chosen, rejected, ONES, ONES, **knobs)
    torch.testing.assert_close(losses, torch.tensor(case["losses"], dtype=torch.float64), rtol=1e-10, atol=1e-14)


def finite(loss, pairs, **knobs):
    """The gradient of chosen and rejected log-probs, of one token each; it, the loss and metrics are finite."""
    leaf = torch.tensor(pairs, requires_grad=True)
    output = loss(*leaf, *torch.ones_like(leaf), **knobs)
    output.loss.backward()
    assert all(value.isfinite().all() for value in (output.loss, leaf.grad, *output.metrics.values()))
    return leaf.grad


def test_orpo_is_finite_at_probability_one():
    finite(orpo_loss, [[0.0, -1.0, -100.0], [-1.0, 0.0, 0.0]])


def test_rewards_are_beta_times_what_the_loss_compares():
    chosen, rejected, chosen_lengths, rejected_lengths = batch = pair_batch()
    means = chosen / chosen_lengths, rejected / rejected_lengths
    for loss, rewards in ((cpo_loss, (chosen, rejected)), (orpo_loss, means), (simpo_loss, means)):
        metrics = loss(*batch, beta=0.3).metrics
        torch.testing.assert_close(metrics["rewards/chosen"], 0.3 * rewards[0].mean())
        torch.testing.assert_close(metrics["rewards/rejected"], 0.3 * rewards[1].mean())
        torch.testing.assert_close(metrics["logps/chosen"], chosen.mean())
        torch.testing.assert_close(metrics["logps/rejected"], rejected.mean())


@pytest.mark.parametrize("alpha", [0.25, 1.0, -0.25, -1.0])
@pytest.mark.parametrize("extreme", [-1e3, -1e4])
def test_alphapo_of_extreme_log_probs_stays_finite_and_trains_the_other_answer(alpha, extreme):
    for pair in ((extreme, -1.0), (-1.0, extreme), (extreme, extreme)):
        finite(simpo_loss, [[value] for value in pair], alpha=alpha)
    gradient = finite(simpo_loss, [[extreme], [-1.0]], alpha=0.25)[1]
    assert gradient.item() == pytest.approx(2.0 * math.exp(0.25), rel=1e-5)  # the pair is entirely wrong: β p^-α
