"""BCO's loss and weights against formulas and a regression written by hand in float64."""

import math

import pytest
import torch

from rlhfkit.losses import bco_loss, dpo_loss
from rlhfkit.losses.preference.unpaired import density_ratio_weights


def test_the_loss_is_that_of_the_formula_answer_by_answer() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, reference, weights = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logprobs.requires_grad_(True)
    weights = weights.abs()
    desirable = torch.tensor([True, False, False, True, False, True])
    mask = torch.tensor([True, True, True, True, True, False])
    output = bco_loss(
        *(logprobs, reference, desirable, 0.3),
        beta=0.7,
        desirable_weight=1.5,
        weights=weights,
        mask=mask,
        denominator=4,
    )
    expected, slopes = 0.0, []
    for row in range(6):
        reward = 0.7 * (float(logprobs[row].detach()) - float(reference[row])) - 0.3
        sign, weight = (1, 1.5) if desirable[row] else (-1, float(weights[row]))
        probability = 1 / (1 + math.exp(-sign * reward))
        kept = float(mask[row])
        expected += kept * weight * -math.log(probability) / 4
        slopes.append(-kept * weight * sign * 0.7 * (1 - probability) / 4)
    assert float(output.loss) == pytest.approx(expected, rel=1e-12)
    output.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-12)
    assert float(output.metrics["reward_shift"]) == pytest.approx(0.3)


def test_without_a_shift_pairs_taken_apart_have_the_loss_of_bco_pair() -> None:
    chosen, rejected, ref_chosen, ref_rejected = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double()
    desirable = torch.arange(10) < 5
    apart = bco_loss(torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected]), desirable, denominator=5)
    pairs = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, loss_type="bco_pair")
    torch.testing.assert_close(apart.loss, pairs.loss)


def test_weights_are_odds_of_a_logistic_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    desirable = torch.rand(40, generator=generator) < (0.8 * embeddings[:, 0] - 0.2).sigmoid()
    found = density_ratio_weights(embeddings, desirable, smallest=1e-6, largest=1e6)
    inputs = torch.cat([embeddings, torch.ones(40, 1, dtype=torch.float64)], 1)
    ridge, solution = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), torch.zeros(4, dtype=torch.float64)
    count = int(desirable.sum())
    balance = torch.where(desirable, 20 / count, 20 / (40 - count)).double()
    for _ in range(30):  # Newton's method
        p = (inputs @ solution).sigmoid()
        slope = inputs.T @ (balance * (p - desirable.double())) + ridge @ solution
        curvature = inputs.T @ (inputs * (balance * p * (1 - p))[:, None]) + ridge
        solution = solution - torch.linalg.solve(curvature, slope)
    odds = (inputs @ solution).exp()
    torch.testing.assert_close(found, torch.where(desirable, 1.0, odds).float(), rtol=1e-5, atol=1e-6)
    clamped = density_ratio_weights(embeddings, desirable)
    assert bool((clamped[~desirable] >= 0.5).all())


def test_prompts_that_are_distributed_alike_have_weight_1_however_many_answers_of_each_class_there_are() -> None:
    prompts = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    desirable = torch.arange(60) < 10
    torch.testing.assert_close(density_ratio_weights(prompts.repeat(6, 1), desirable), torch.ones(60))
