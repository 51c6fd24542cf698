"""How far the engine's log-probs are from the trainer's, for the same policy and the same tokens."""

import torch
from torch import Tensor

from rlhfkit.losses import importance_weights, mismatch_metrics


@torch.no_grad()
def rollout_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What every run logs of it.

    NaN where the engine knows no log-prob of any token (see :class:`~rlhfkit.rollout.engine.UntruncatedLogprobs`).

    Args:
        old_logprobs: (B, T-1), the trainer's.
        rollout_logprobs: (B, T-1), the engine's.
        mask: (B, T-1), true where the policy chose the token.
    """
    mismatch = mismatch_metrics(old_logprobs, rollout_logprobs, mask)
    unbounded = importance_weights(old_logprobs, rollout_logprobs, mask, mode="none", high=None)
    known = (mask.bool() & ~rollout_logprobs.isnan()).any() | ~mask.any()
    metrics = {
        "rollout/logprob_difference": mismatch["rollout_corr/logprob_abs_diff_mean"],
        "rollout/logprob_difference_max": mismatch["rollout_corr/logprob_abs_diff_max"],
        "rollout/k3": mismatch["rollout_corr/k3_kl"],
        "rollout/effective_sample_fraction": unbounded.metrics["rollout_corr/eff_sample_size"],
    }
    return {name: torch.where(known, value, torch.nan) for name, value in metrics.items()}
