"""How far the engine's log-probs are from the trainer's, for the same policy and the same tokens."""

import math

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import masked_sum, select
from rlhfkit.losses.metrics import max_metric, sums_metric


@torch.no_grad()
def rollout_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What every run logs of it.

    NaN where the engine knows no log-prob of any token (see :class:`~rlhfkit.rollout.engine.UntruncatedLogprobs`).

    Args:
        old_logprobs: (B, T-1), the trainer's.
        rollout_logprobs: (B, T-1), the engine's.
        mask: (B, T-1), true where the policy chose the token.
    """
    known = mask.bool() & ~rollout_logprobs.isnan()
    log_ratio = select(old_logprobs.float() - rollout_logprobs.float(), known)
    count, clamped = known.sum(), log_ratio.clamp(-20.0, 20.0)
    weights = clamped.exp()
    return {
        "rollout/logprob_difference": sums_metric(_mean, log_ratio.abs().sum(), count),
        "rollout/logprob_difference_max": max_metric(log_ratio.abs(), known, empty=math.nan),
        "rollout/k3": sums_metric(_mean, masked_sum(torch.expm1(clamped) - clamped, known), count),
        "rollout/effective_sample_fraction": sums_metric(
            _effective_fraction, masked_sum(weights, known), masked_sum(weights.square(), known), count
        ),
    }


def _mean(state: Tensor) -> Tensor:
    total, count = state
    return total / count


def _effective_fraction(state: Tensor) -> Tensor:
    total, squares, count = state
    return total.square() / (squares * count)
