import math

import pytest
import torch

from rlhfkit.losses import kl_estimate

from .policy_cases import OPENRLHF, gradient, tensors


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_openrlhf_golden_values(estimator):
    inputs = tensors(OPENRLHF["inputs"])
    expected = torch.tensor(OPENRLHF["kl"][estimator], dtype=torch.float64)
    got = kl_estimate(inputs["logp"], inputs["ref"], estimator=estimator, clamp=10.0)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)  # six digits are recorded


@pytest.mark.parametrize(
    ("estimator", "weighted", "direction"),
    [("k1", False, None), ("k2", False, "reverse"), ("k3", False, "forward"), ("k3", True, "reverse")],
)
def test_expected_gradient_is_the_one_the_docstring_names(estimator, weighted, direction):
    logits = torch.randn(1, 9, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    reference = torch.randn(1, 9, dtype=torch.float64).log_softmax(-1)
    weight = torch.exp(policy - policy.detach()) if weighted else None
    estimate = kl_estimate(policy, reference, estimator=estimator, importance_weight=weight)
    got = gradient((policy.detach().exp() * estimate).sum(), logits)
    exact = {
        "reverse": lambda: (policy.exp() * (policy - reference)).sum(),
        "forward": lambda: (reference.exp() * (reference - policy)).sum(),
    }
    expected = torch.zeros_like(logits) if direction is None else gradient(exact[direction](), logits)
    torch.testing.assert_close(got, expected)


def test_estimates_of_an_impossible_token_stay_finite_under_a_clamp_in_value_and_gradient():
    logprobs = torch.tensor([[-1e4]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1, 1), clamp=10.0)
    assert estimate.item() == 10.0
    assert gradient(estimate.sum(), logprobs).item() == 0.0
    assert kl_estimate(logprobs, torch.zeros(1, 1), estimator="k1", clamp=10.0).item() == -10.0


@pytest.mark.parametrize("distance", [-79.0, -81.0, -1e3])
def test_k3_never_pushes_a_token_further_away_from_the_reference(distance):
    logprobs = torch.tensor([[distance]], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.zeros(1, 1))
    got = gradient(estimate.sum(), logprobs).item()
    assert got == (0.0 if distance < -80.0 else pytest.approx(1.0 - math.exp(79.0), rel=1e-5))
    assert estimate.item() == pytest.approx(math.expm1(min(-distance, 80.0)), rel=1e-5)
