"""``EngineMismatch``: how far the log-probs of engine and trainer are apart for the same policy."""

import math

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import masked_sum, max_metric
from rlhfkit.losses.aggregation import select
from rlhfkit.losses.metrics import sums_metric
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Part


class EngineMismatch(Part):
    """Logs how far the log-probs of engine and trainer are apart, for the same tokens and policy.

    The metrics are those of :func:`~rlhfkit.losses.mismatch_metrics` of the same names, and NaN if the engine knows no
    log-probs (see ``RolloutEngine.configure_logprobs``). Replayed samples, which are of other policies on purpose, are
    left out. Modules that learn from their own samples make one.
    """

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> dict[str, Tensor]:
        """Compare the trainer's log-probs before the iteration with the engine's."""
        known = batch.action_mask & ~batch.rollout_logprobs.isnan()
        if batch.replayed is not None:
            known = known & ~batch.replayed[:, None]
        log_ratio = select(old.float() - batch.rollout_logprobs.float(), known)
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
