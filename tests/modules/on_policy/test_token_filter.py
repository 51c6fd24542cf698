"""Filters of tokens against the loss functions called by hand.

Covers modules/parts/token_filters.py and correction.py.
"""

from typing import Any

import pytest
import torch

from rlhfkit import GRPOModule
from rlhfkit.losses import (
    importance_weights,
    off_policy_sequence_mask,
    ppo_loss,
    rejection_mask,
    top_entropy_mask,
)
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.parts import Correction
from rlhfkit.modules.parts.token_filters import OffPolicyMask, Rejection, TopEntropy, nth_largest_of_all

from .test_functions import prepared

REJECTION: dict[str, Any] = {"level": "token", "divergence": "k2", "high": 0.02}


def test_a_token_that_fails_one_of_several_tests_has_weight_0_and_counts() -> None:
    batch, (logprobs, old, _, mask) = prepared()
    engine, entropy = batch.rollout_logprobs, torch.rand(6, 6, generator=torch.Generator().manual_seed(3))
    entropies = TopEntropy(0.5)
    batch = entropies.prepare(batch.with_columns(entropy=entropy))
    kept = {
        entropies: top_entropy_mask(entropy, mask, fraction=0.5),
        # One answer is 0.107 nats away, another one 0.119, and all others are near.
        OffPolicyMask(0.11): off_policy_sequence_mask(batch.advantages, logprobs, engine, mask, threshold=0.11),
        Rejection(**REJECTION): rejection_mask(old, engine, mask, **REJECTION),
    }
    weights = torch.stack([*kept.values()]).all(0).float()
    assert 0 < weights[mask].sum() < mask.sum()
    weights = weights * importance_weights(old, engine, mask).weights
    module = GRPOModule("anywhere", policy_loss="ppo_loss", parts=[Correction("tis"), *kept])
    found = module.loss(batch, PolicyOutput(logprobs, None))
    expected = ppo_loss(logprobs, old, batch.advantages, mask, weights=weights, denominator=20.0)
    torch.testing.assert_close(found.loss, expected.loss)
    for number, (part, passed) in enumerate(kept.items()):
        metric = "policy/kept_fraction" + (f"/{type(part).__name__}" if number else "")
        torch.testing.assert_close(found.metrics[metric], passed[mask].float().mean())
    assert module.uses_rollout_logprobs
    assert not GRPOModule("anywhere", parts=[TopEntropy(0.5)]).uses_rollout_logprobs


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_the_nth_largest_of_all_is_that_of_a_sorted_list(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-8, 8, (count,), generator=generator)
    values[: count // 3] = values[-1]  # ties
    values[count // 2] = 0.0
    order = values.sort(descending=True).values.tolist()
    assert [nth_largest_of_all(values, place) for place in range(0, count, 1 + count // 50)] == order[
        :: 1 + count // 50
    ]
    assert nth_largest_of_all(values, count) == -torch.inf
    assert nth_largest_of_all(values[:0], 0) == -torch.inf
