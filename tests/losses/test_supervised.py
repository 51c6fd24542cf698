import math

import pytest
import torch

from rlhfkit.losses import cross_entropy_loss, dft_loss

from .policy_cases import TRL, policy_batch

GOLDEN = TRL["sft"]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_value_and_gradient_match_trl(case):
    # Quirk left behind: TRL's gradient on masked positions is not 0 (it relies on their log-probs being constant 0).
    logprobs = torch.tensor(GOLDEN["inputs"]["per_token_logps"], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(GOLDEN["inputs"]["labels"])[:, 1:] != -100
    output = (dft_loss if case["args"] else cross_entropy_loss)(logprobs, mask, denominator=case["num_items_in_batch"])
    output.loss.backward()
    expected = torch.where(mask, torch.tensor(case["grad"], dtype=torch.float64), 0.0)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-10)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-10, atol=1e-14)


def test_metrics_are_nll_and_perplexity_and_detached():
    _, logprobs, _, mask = policy_batch()
    for loss in (cross_entropy_loss, dft_loss):
        output = loss(logprobs.clone().requires_grad_(), mask)
        torch.testing.assert_close(output.metrics["sft/nll"], -logprobs[mask].mean())
        torch.testing.assert_close(output.metrics["sft/perplexity"], (-logprobs[mask].mean()).exp())
        assert not any(metric.requires_grad for metric in output.metrics.values())


def test_dft_of_an_impossible_label_is_zero_with_zero_gradient():
    logprobs = torch.tensor([[-float("inf"), -200.0, -1.0]], requires_grad=True)
    output = dft_loss(logprobs, torch.ones(1, 3), denominator=1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.exp(-1.0))
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -math.exp(-1.0)])
