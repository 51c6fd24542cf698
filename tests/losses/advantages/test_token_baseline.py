"""The optimal token baseline against sums of one position at a time."""

import math

import pytest
import torch

from rlhfkit.losses import optimal_token_advantages

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.2, torch.nan, 0.9], dtype=torch.float64)
GROUP = torch.tensor([4, 4, 4, 7, 7, 7])
MASK = torch.tensor(
    [[0, 1, 1, 1, 0], [0, 1, 0, 0, 0], [0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
).bool()


def inputs() -> torch.Tensor:
    """(6, 5) log-probs of tokens of random distributions over four."""
    chances = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return chances[..., 0].log()


def test_advantages_by_hand() -> None:
    logprobs = inputs()
    got = optimal_token_advantages(REWARDS, GROUP, MASK, logprobs)
    norms = (1 - logprobs.exp()) ** 2
    actions = [MASK[row].nonzero()[:, 0].tolist() for row in range(6)]
    for row in range(6):
        for place, step in enumerate(actions[row]):
            if math.isnan(float(REWARDS[row])):
                assert got[row, step] == 0
                continue
            others = [
                one
                for one in range(6)
                if GROUP[one] == GROUP[row] and len(actions[one]) > place and not math.isnan(float(REWARDS[one]))
            ]
            weights = {one: sum(float(norms[one, step]) for step in actions[one][: place + 1]) for one in others}
            baseline = sum(weights[one] * float(REWARDS[one]) for one in others) / sum(weights.values())
            assert float(got[row, step]) == pytest.approx(float(REWARDS[row]) - baseline, abs=1e-12)
    assert not got[~MASK].any()


def test_equal_rewards_missing_log_probs_and_certain_tokens() -> None:
    logprobs = inputs()
    equal = optimal_token_advantages(torch.full((6,), 0.1), GROUP, MASK, logprobs)
    assert not equal.any()
    assert equal.dtype == torch.float32
    unknown = optimal_token_advantages(REWARDS, GROUP, MASK, torch.full_like(logprobs, torch.nan))
    assert unknown.isfinite().all()  # positions count as weights, as with equal norms
    assert float(unknown[0, 1]) == pytest.approx(0.5)
    certain = optimal_token_advantages(REWARDS, GROUP, MASK, torch.zeros_like(logprobs))
    assert float(certain[0, 1]) == pytest.approx(0.5)  # no token has a gradient: the mean of the group
