"""Losses of a critic and of texts; every one by a loop of its own: ``modules/test_loops_by_hand.py``."""

import math

import pytest
import torch

from rlhfkit.losses import cross_entropy_loss, dft_loss, value_loss

from .policy_cases import OPENRLHF, gradient, policy_batch, tensors


@pytest.mark.parametrize(("name", "clip"), [("clip05", 0.5), ("clip02", 0.2), ("noclip", None)])
def test_openrlhf_golden_values(name, clip):
    golden = tensors(OPENRLHF["value"])
    mask = torch.tensor(OPENRLHF["inputs"]["mask"])
    got = value_loss(golden["v"], golden["old"], golden["ret"], mask, clip=clip)
    assert got.loss.item() == pytest.approx(OPENRLHF["value"][name], abs=1e-6)  # six digits are recorded


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[2.0, 0.6, 0.0]], dtype=torch.float64)
    output = value_loss(values, old, returns, torch.ones(1, 3), clip=0.5)
    # Errors 1, .16, 1; of the clipped values .5, .5, -.5 they are 2.25, .01, .25: the larger of each counts.
    assert output.loss.item() == pytest.approx(0.5 * (2.25 + 0.16 + 1.0) / 3)
    assert gradient(output.loss, values)[0].tolist() == pytest.approx([0.0, 0.4 / 3, -1.0 / 3])
    assert output.metrics["value/clip_fraction"].item() == pytest.approx(1 / 3)
    assert output.metrics["value/mean"].item() == pytest.approx(1 / 3)
    assert output.metrics["value/error"].item() == pytest.approx(2.16 / 3)


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, torch.nan]]), torch.tensor([[1, 1, 1, 0]])
    for values, expected in ((returns, 1.0), (torch.full((1, 4), 2.0), 0.0), (-returns, -3.0)):
        metrics = value_loss(values, None, returns, mask).metrics
        assert metrics["value/explained_variance"].item() == pytest.approx(expected)
    flat = value_loss(returns, None, torch.ones(1, 4), mask).metrics["value/explained_variance"]
    assert flat.item() == 0.0


def test_without_old_values_the_clip_cannot_bind():
    leaf, _, returns, mask = policy_batch().leaf()
    got = value_loss(leaf, None, returns, mask, clip=0.01)
    same = value_loss(leaf, leaf.detach(), returns, mask, clip=0.01)
    assert got.loss.item() == same.loss.item() == value_loss(leaf, None, returns, mask, clip=None).loss.item()
    torch.testing.assert_close(gradient(got.loss, leaf), gradient(same.loss, leaf))


def test_values_inside_the_clip_are_not_counted_as_clipped_by_rounding():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (0.2 * torch.randn(3, 16, 256, generator=generator)).unbind()  # 12 % of which were counted
    metrics = value_loss(values, old, returns, torch.ones(16, 256), clip=2.0).metrics
    assert metrics["value/clip_fraction"].item() == 0.0


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
