"""BCO's weights against a regression written by hand in float64; its loss: ``modules/preference/test_bco.py``."""

import torch

from rlhfkit.losses.preference.unpaired import density_ratio_weights


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
