"""The probe after a weight sync: strict where types are exact, on the mean of sampled tokens where they are not."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import Iterations, digits, setup_run

from rlhfkit import LocalEngine, RolloutCallback, Sample, SamplingSpec
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


def test_tf32_is_not_held_to_float32_and_a_tolerance_replaces_bounds_and_not_the_statistic() -> None:
    assert ProbeBounds.of(torch.float32, tf32=True) == ProbeBounds.of(torch.float16)
    assert ProbeBounds.of(torch.float64, tf32=True) == ProbeBounds.of(torch.float64)
    assert ProbeBounds.of(torch.bfloat16, 0.7) == ("mean", 0.7, 0.7)
    assert ProbeBounds.of(torch.float32, 0.0) == ("max", 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_passes_no_bound_and_no_tokens_pass_all(dtype: torch.dtype) -> None:
    bounds = ProbeBounds.of(dtype)
    assert not bounds.measure(torch.tensor([0.0, math.nan])) <= bounds.fail
    assert bounds.measure(torch.tensor([])) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_engines_in_8_bits_may_be_as_far_off_as_8_bits_make_them(dtype: torch.dtype) -> None:
    differences = torch.full((100,), 0.25)  # more than FP8 gives in a small model, 0.15
    exact, quantized = ProbeBounds.of(dtype), ProbeBounds.of(dtype, quantized=True)
    assert exact.measure(differences) > exact.warn
    assert quantized.measure(differences) < quantized.warn < quantized.fail < quantized.measure(8 * differences)
    assert ProbeBounds.of(dtype, 0.1, quantized=True).fail == 0.1


class Shifted(LocalEngine):
    """Scores as if its weights were a little different, more after each sync; notes what it is asked."""

    def __init__(self, *shifts: float) -> None:
        super().__init__()
        self.shifts = shifts
        self.asked: list[list[int]] = []

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.asked += map(list, sequences)
        shift = self.shifts[len(self.asked) - 1]
        return [[logprob + shift for logprob in row] for row in super().score(sequences)]


def test_a_small_mean_difference_is_fine_a_larger_one_warned_of_and_a_large_one_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Shifted(0.0, 0.2, 0.5)
    sampling = SamplingSpec(group_size=4, max_new_tokens=40, min_new_tokens=40)
    rollouts, seen = RolloutCallback(digits, engine=engine, sampling=sampling), Iterations()
    options = {"callbacks": [seen], "precision": "bf16-true", "max_epochs": 3}
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, **options)
    caplog.set_level(logging.WARNING, logger="rlhfkit.callbacks.rollout.parts.probe")
    with pytest.raises(RuntimeError, match=r"differ from the trainer's by 0\.\d+ on average over 40 tokens, more than"):
        trainer.fit(module, data)
    warned = [record.message for record in caplog.records if "on average over 40 tokens" in record.message]
    assert len(warned) == 1
    assert engine.version is None
    random, *sampled = engine.asked
    assert len(random) == 32
    first = [*(samples[0] for samples in seen.samples), rollouts.samples[0]]  # the last epoch has not ended
    assert sampled == [[*one.prompt.token_ids.tolist(), *one.token_ids.tolist()] for one in first]


class Several(Shifted):
    """Three engines, of which one has other weights; none may be asked for samples."""

    def generate(self, *arguments: Any, **more: Any) -> list[Sample]:
        raise AssertionError("samples of other weights")

    def scores(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        right = LocalEngine.score(self, sequences)
        return {
            "engine 0": right,
            "engine 1": [[one + self.shifts[0] for one in row] for row in right],
            "engine 2": right,
        }


@pytest.mark.parametrize("shift", [-0.5, math.nan])
def test_one_of_several_engines_with_other_weights_is_named(tmp_path: Path, shift: float) -> None:
    rollouts = RolloutCallback(digits, engine=Several(shift), sampling=SamplingSpec(group_size=4, max_new_tokens=4))
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts)
    with pytest.raises(RuntimeError, match=r"engine 1's log-probs differ from the trainer's by (0\.5|nan), more than"):
        trainer.fit(module, data)
    assert rollouts.engine.version is None
