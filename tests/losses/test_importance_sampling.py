import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit import losses

from .policy_cases import FIELD, policy_batch, tensors

INPUTS = tensors(FIELD["inputs"])
PAIR = INPUTS["old"], INPUTS["rollout"], INPUTS["mask"]
VERL = FIELD["verl_rollout_correction(log_ratio=old-rollout)"]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_golden_weights(level):
    recorded = VERL[f"is|{level}|thr2|bn0"]
    golden, expected = recorded["metrics"], torch.tensor(recorded["w"], dtype=torch.float64)
    got = losses.importance_weights(*PAIR, level=level, mode="truncate", high=2.0)
    torch.testing.assert_close(got.weights * INPUTS["mask"], expected, rtol=1e-7, atol=1e-7)
    for ours in ("is_mean", "is_max", "is_min"):
        assert got.metrics[f"rollout_corr/{ours}"].item() == pytest.approx(golden[f"rollout_{ours}"], rel=1e-6)
    # Quirk: for deviation and effective sample size verl also holds the weights *up*, at one over the cap.
    if level == "token":  # here nothing lies below one half
        size = got.metrics["rollout_corr/eff_sample_size"].item()
        assert size == pytest.approx(golden["rollout_is_eff_sample_size"], rel=1e-6)
        assert got.metrics["rollout_corr/is_std"].item() == pytest.approx(golden["rollout_is_std"], rel=1e-5)


def test_verl_golden_off_policy_metrics():
    measured = losses.mismatch_metrics(*PAIR)
    for name, expected in VERL["offpolicy_metrics"].items():
        assert measured[f"rollout_corr/{name}"].item() == pytest.approx(expected, rel=1e-7)


RATIOS = torch.tensor([[0.25, 1.0, 4.0, 1.0]])  # product 1, geometric mean 1
UNKNOWN = torch.tensor([[torch.nan, 8.0, 1.0, 1.0]])  # product 8, geometric mean 2
SKEWED = torch.tensor([[2.0, 4.0, 8.0, 1.0]])  # product 64, geometric mean 64^(1/4)


@pytest.mark.parametrize(
    ("ratios", "knobs", "expected"),
    [
        (RATIOS, {"mode": "truncate", "high": 2.0}, [0.25, 1, 2, 1]),
        (RATIOS, {"mode": "clip", "low": 0.5, "high": 2.0}, [0.5, 1, 2, 1]),
        (RATIOS, {"mode": "mask", "low": 0.5, "high": 2.0}, [0, 1, 0, 1]),
        (RATIOS, {"mode": "mask", "low": 0.25, "high": 4.0}, [0.25, 1, 4, 1]),
        (RATIOS, {"mode": "none", "high": None}, [0.25, 1, 4, 1]),
        (UNKNOWN, {"mode": "none", "high": None}, [1, 8, 1, 1]),
        (UNKNOWN, {"level": "geometric", "mode": "none", "high": None}, [2, 2, 2, 2]),
        (SKEWED, {"level": "sequence", "mode": "truncate", "high": 10.0}, [10, 10, 10, 10]),
        (SKEWED, {"level": "sequence", "mode": "mask", "high": 10.0}, [0, 0, 0, 0]),
        (SKEWED, {"level": "sequence", "mode": "none", "high": None}, [64, 64, 64, 64]),
        (SKEWED, {"level": "geometric", "mode": "truncate", "high": 10.0}, [64**0.25] * 4),
        (SKEWED, {"level": "geometric", "mode": "clip", "low": 3.0, "high": 10.0}, [3, 3, 3, 3]),
        (SKEWED, {"mode": "none", "high": None, "reject": ("geometric", None, 2.0)}, [0, 0, 0, 0]),
        (SKEWED, {"mode": "none", "high": None, "reject": ("geometric", None, 3.0)}, [2, 4, 8, 1]),
        (SKEWED, {"high": 4.0, "reject": ("token", 2.0, None)}, [2, 4, 4, 0]),
    ],
)
def test_level_and_mode_by_hand(ratios, knobs, expected):
    got = losses.importance_weights(torch.zeros(1, 4), -ratios.log(), torch.ones(1, 4), **knobs)
    assert got.weights[0].tolist() == pytest.approx(expected)
    assert got.keep[0].tolist() == [weight != 0 for weight in expected]
    assert got.metrics["rollout_corr/masked_fraction"].item() == sum(weight == 0 for weight in expected) / 4


def test_metrics_are_of_the_ratios_before_they_are_bounded():
    pair = torch.zeros(1, 4), -torch.tensor([[0.25, 1.0, 2.0, 1.0]]).log(), torch.ones(1, 4)
    found = {**losses.importance_weights(*pair, high=1.5).metrics, **losses.mismatch_metrics(*pair)}
    expected = {"is_max": 2.0, "is_min": 0.25, "is_bounded_fraction": 0.25}
    expected |= {"logprob_abs_diff_max": math.log(4.0), "logprob_abs_diff_mean": math.log(8.0) / 4}
    assert {name: found[f"rollout_corr/{name}"].item() for name in expected} == pytest.approx(expected)


def test_normalised_weights_have_mean_one_over_the_tokens_and_keep_their_proportions():
    mask = torch.tensor([[1, 1, 1, 0]])
    ratios = torch.tensor([[1.0, 2.0, 6.0, 100.0]])
    got = losses.importance_weights(ratios.log(), torch.zeros(1, 4), mask, high=3.0, normalize=True)
    assert got.weights[0].tolist() == pytest.approx([0.5, 1.0, 1.5, 1.0])
    nothing = losses.importance_weights(ratios.log(), torch.zeros(1, 4), mask, mode="mask", high=0.5, normalize=True)
    assert nothing.weights[0].tolist() == [0.0, 0.0, 0.0, 1.0]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(losses.CORRECTION_PRESETS)))
def test_masked_entries_padding_and_order_do_not_matter(seed, name):
    batch, generator = policy_batch(seed), torch.Generator().manual_seed(seed)
    pair = batch.logprobs, batch.old_logprobs
    expected = losses.importance_weights(*pair, batch.mask, **losses.CORRECTION_PRESETS[name])
    order = torch.randperm(5, generator=generator)
    holed = [torch.where(batch.mask, tensor, torch.nan)[order] for tensor in pair]
    padded = [torch.nn.functional.pad(tensor, (0, 3), value=torch.inf) for tensor in holed]
    mask = torch.nn.functional.pad(batch.mask[order], (0, 3))
    got = losses.importance_weights(*padded, mask, **losses.CORRECTION_PRESETS[name])
    torch.testing.assert_close(got.weights[:, :7], expected.weights[order])
    assert (got.weights[~mask] == 1.0).all()
    torch.testing.assert_close(dict(got.metrics), dict(expected.metrics))
    torch.testing.assert_close(losses.mismatch_metrics(*padded, mask), losses.mismatch_metrics(*pair, batch.mask))


def test_weights_are_detached_and_extremes_stay_finite():
    logprobs = torch.tensor([[0.0, -1e4]], requires_grad=True)
    got = losses.importance_weights(logprobs, torch.tensor([[-1e4, 0.0]]), torch.ones(1, 2), mode="none", high=None)
    assert not got.weights.requires_grad
    assert got.weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    zeros = torch.zeros(2, 3)  # nothing selected
    nothing = losses.importance_weights(zeros, zeros, zeros).metrics, losses.mismatch_metrics(zeros, zeros, zeros)
    for metrics in (losses.mismatch_metrics(logprobs, logprobs.detach() - 1e4, torch.ones(1, 2)), *nothing):
        assert all(value.isfinite() for value in metrics.values())


def test_rejection_statistics_by_hand():
    log_ratio = torch.tensor([[0.3, -0.1], [0.1, 0.1]])
    zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
    for level, divergence, high, expected in (
        ("token", "k2", 0.006, [[False, True], [True, True]]),
        ("token", "k3", 0.0052, [[False, True], [True, True]]),  # e^0.1 - 1.1 is 0.00517
        ("sequence-mean", "k1", math.exp(0.15), [[True, True], [True, True]]),
        ("sequence-sum", "k1", math.exp(0.15), [[False, False], [False, False]]),
        ("sequence-max", "k1", math.exp(0.15), [[False, False], [True, True]]),
        ("sequence-sum", "k2", 0.02, [[False, False], [True, True]]),
    ):
        got = losses.rejection_mask(log_ratio, zeros, ones, level=level, divergence=divergence, high=high)
        assert got.tolist() == expected, (level, divergence)
    ratio = torch.tensor([[0.7, 0.9, 1.1, 1.3, 1.45]])  # trainer over engine; verl's bounds are of engine over trainer
    five = torch.zeros(1, 5), torch.ones(1, 5)
    got = losses.rejection_mask(ratio.log(), *five, level="token", divergence="k1", low=0.8, high=1.4)
    assert got.tolist() == [[False, True, True, True, False]]


def test_off_policy_mask_ignores_what_is_masked_and_judges_tokens_by_their_own_advantage():
    batch = policy_batch()
    holes = torch.where(batch.mask, batch.old_logprobs + 5.0, torch.nan)
    kept = losses.off_policy_sequence_mask(batch.advantages, batch.logprobs, holes, batch.mask, threshold=1.0)
    assert torch.equal(kept[batch.mask], batch.advantages[batch.mask] >= 0)
    assert kept[~batch.mask].all()
