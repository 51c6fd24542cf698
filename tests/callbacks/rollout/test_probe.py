"""Bounds on differences of log-probs: strict where types are exact, on the mean where they are not."""

import math

import pytest
import torch

from rlhfkit.callbacks.rollout.parts.probe import ProbeBounds

MANTISSA = {torch.bfloat16: 8, torch.float16: 11}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_that_is_off_fails_in_an_exact_type(dtype: torch.dtype) -> None:
    bounds, differences = ProbeBounds.of(dtype), torch.zeros(1000)
    differences[17] = -2e-3
    assert bounds.measure(differences) == pytest.approx(2e-3)
    assert bounds.measure(differences) > bounds.fail == bounds.warn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_that_are_rounded_pass_and_those_of_other_weights_do_not(dtype: torch.dtype) -> None:
    """Logits between 16 and 32 rounded to the type, of tokens that were sampled from them: far below the warning."""
    torch.manual_seed(0)
    bounds = ProbeBounds.of(dtype)
    logits = (4 * torch.randn(256, 1000)).clamp(-14, 14) + 18
    tokens = torch.distributions.Categorical(logits=logits).sample()[:, None]

    def logprobs(of: torch.Tensor) -> torch.Tensor:
        return of.double().log_softmax(-1).gather(-1, tokens)[:, 0]

    rounding = logprobs(logits.to(dtype)) - logprobs(logits)
    assert 0 < bounds.measure(rounding) < bounds.warn
    # A step of a logit here is 2^5 / 2^mantissa; the largest difference may reach half of it.
    assert rounding.abs().max() <= 2.0 ** (5 - MANTISSA[dtype])
    others = logprobs(4 * torch.randn(256, 1000)) - logprobs(logits)
    assert bounds.measure(others) > bounds.fail > bounds.warn


def test_a_single_token_does_not_fail_where_rounding_makes_some_far_off() -> None:
    differences = torch.full((64,), 0.01)
    differences[3] = 1.5
    bounds = ProbeBounds.of(torch.bfloat16)
    assert bounds.measure(differences) < bounds.warn


def test_tf32_is_not_held_to_float32() -> None:
    assert ProbeBounds.of(torch.float32, tf32=True) == ProbeBounds.of(torch.float16)
    assert ProbeBounds.of(torch.float64, tf32=True) == ProbeBounds.of(torch.float64)


def test_a_tolerance_replaces_both_bounds_and_not_the_statistic() -> None:
    assert ProbeBounds.of(torch.bfloat16, 0.7) == ("mean", 0.7, 0.7)
    assert ProbeBounds.of(torch.float32, 0.0) == ("max", 0.0, 0.0)


def test_nan_passes_no_bound_and_no_tokens_pass_all() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        bounds = ProbeBounds.of(dtype)
        assert math.isnan(bounds.measure(torch.tensor([0.0, math.nan])))
        assert not math.nan <= bounds.fail
        assert bounds.measure(torch.tensor([])) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_engines_in_8_bits_may_be_as_far_off_as_8_bits_make_them(dtype: torch.dtype) -> None:
    differences = torch.full((100,), 0.25)  # more than FP8 gives in a small model, 0.15
    exact, quantized = ProbeBounds.of(dtype), ProbeBounds.of(dtype, quantized=True)
    assert exact.measure(differences) > exact.warn
    assert quantized.measure(differences) < quantized.warn < quantized.fail < quantized.measure(8 * differences)
    assert ProbeBounds.of(dtype, 0.1, quantized=True).fail == 0.1
