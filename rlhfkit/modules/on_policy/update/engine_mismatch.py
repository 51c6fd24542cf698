"""How far the log-probs of engine and trainer are apart for the same policy: importance correction, and metrics."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import CORRECTION_PRESETS, importance_weights, masked_sum, max_metric, select, sums_metric


def correction_arguments(correction: str | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the arguments of a correction, which may be a name; ValueError if the name is unknown."""
    if not isinstance(correction, str):
        return correction
    if correction == "none":
        return None
    if correction not in CORRECTION_PRESETS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTION_PRESETS)}, none, got {correction!r}")
    return CORRECTION_PRESETS[correction]


def weighs_sequences(correction: Mapping[str, Any]) -> bool:
    """Whether the arguments of a correction give all tokens of a sequence the same weight."""
    return "token" not in (correction.get("level", "token"), correction.get("reject_level"))


def correction_weights(
    correction: Mapping[str, Any], batch: Experience, old_logprobs: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Importance weights of tokens (B, T-1), or of sequences (B, 1), and their metrics.

    Args:
        correction: Arguments of :func:`~rlhfkit.losses.importance_weights`.
        batch: B sequences of T tokens, with the engine's log-probs.
        old_logprobs: (B, T-1) of the trainer, before the iteration.
    """
    mask = batch.action_mask
    weights, _, metrics = importance_weights(old_logprobs, batch.rollout_logprobs, mask, **correction)
    if weighs_sequences(correction):
        # (B, 1), not repeated on every token: VESPO takes the product over a sequence.
        weights = select(weights, mask, fill=-torch.inf).amax(-1, keepdim=True)
        weights = select(weights, mask.any(-1, keepdim=True), fill=1.0)
    return weights, metrics


def mismatch_metrics(old_logprobs: Tensor, batch: Experience) -> dict[str, Tensor]:
    """Compare the trainer's log-probs before the iteration, (B, T-1), with the engine's of the same tokens.

    NaN if the engine knows no log-probs (see ``RolloutEngine.configure_logprobs``). Replayed samples, which are of
    other policies on purpose, are left out.
    """
    known = batch.action_mask & ~batch.rollout_logprobs.isnan()
    if batch.replayed is not None:
        known = known & ~batch.replayed[:, None]
    log_ratio = select(old_logprobs.float() - batch.rollout_logprobs.float(), known)
    difference, count, clamped = log_ratio.abs(), known.sum(), log_ratio.clamp(-20.0, 20.0)
    weights, k3 = clamped.exp(), torch.expm1(clamped) - clamped
    weight_sums = masked_sum(weights, known), masked_sum(weights.square(), known)
    return {
        "rollout_corr/logprob_abs_diff_mean": sums_metric(_mean, difference.sum(), count),
        "rollout_corr/logprob_abs_diff_max": max_metric(difference, known, empty=math.nan),
        "rollout_corr/k3_kl": sums_metric(_mean, masked_sum(k3, known), count),
        "rollout_corr/untruncated_eff_sample_size": sums_metric(_effective_fraction, *weight_sums, count),
    }


def _mean(state: Tensor) -> Tensor:
    return state[0] / state[1]


def _effective_fraction(state: Tensor) -> Tensor:
    """``(Σw)² / (n Σw²)`` from Σw, Σw² and n."""
    return state[0].square() / (state[1] * state[2])
