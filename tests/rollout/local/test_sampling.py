"""Truncation rules and the sampled token, against closed forms.

Covers ``sample_tokens`` and ``truncate`` of rollout/local/generator.py.
"""

import pytest
import torch

from rlhfkit.rollout.engine import SamplingSpec, sample_seed
from rlhfkit.rollout.local.generator import sample_tokens, truncate

PROBABILITIES = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]])


def kept(spec: SamplingSpec) -> list[int]:
    return truncate(PROBABILITIES.log(), spec)[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (SamplingSpec(), [0, 1, 2, 3, 4]),
        (SamplingSpec(top_k=2), [1, 3]),
        (SamplingSpec(top_p=0.65), [1, 3]),
        (SamplingSpec(top_p=0.71), [1, 2, 3]),
        (SamplingSpec(top_p=0.01), [1]),
        (SamplingSpec(min_p=0.3), [1, 2, 3]),
        (SamplingSpec(min_p=0.3, top_k=2), [1, 3]),
    ],
)
def test_truncation_keeps_what_its_rule_says(spec: SamplingSpec, tokens: list[int]) -> None:
    assert kept(spec) == tokens


@pytest.mark.parametrize(
    ("spec", "truncates"),
    [
        (SamplingSpec(), False),
        (SamplingSpec(temperature=0.5), False),
        (SamplingSpec(top_p=0.9), True),
        (SamplingSpec(top_k=5), True),
        (SamplingSpec(min_p=0.1), True),
        (SamplingSpec(min_new_tokens=2), True),
        (SamplingSpec(group_size=1, temperature=0.0, top_p=0.9, top_k=5, min_p=0.1), False),
    ],
)
def test_a_spec_knows_whether_it_takes_tokens_away(spec: SamplingSpec, truncates: bool) -> None:
    assert spec.truncates is truncates


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.049, 0), (0.051, 1), (0.46, 2), (0.61, 3), (0.999, 4)])
def test_draw_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    drawn, _ = sample_tokens(PROBABILITIES.log(), torch.tensor([uniform], dtype=torch.float64), SamplingSpec())
    assert drawn.item() == token


def test_seeds_tell_samples_apart() -> None:
    seeds = {sample_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3, 4) == sample_seed(1, 2, 3, 4)
