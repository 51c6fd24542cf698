"""KL divergence to a reference policy, estimated from the log-probs of sampled tokens.

Estimates of ``KL(π || ref)`` from ``y ~ π`` (Schulman, "Approximating KL divergence", 2020). Exact divergences over the
whole vocabulary are in :mod:`rlhfkit.losses.distillation`.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    masked_mean,
    select,
)

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of :func:`kl_estimate`."""

_LARGEST_DIFFERENCE = 80.0  # e^80 is the last round number that is finite in float32 with room for a product


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: KLEstimator = "k3",
    clamp: float | None = None,
    importance_weight: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of ``KL(π || ref)`` from tokens sampled from ``π``.

    With ``d_t = log π(y_t) - log ref(y_t)``:

    ==========  =======================  ============  ==========================================================
    estimator   value                    as a value    its gradient, when it is added to a loss
    ==========  =======================  ============  ==========================================================
    ``k1``      ``d``                    unbiased      has mean 0: for the reward, not for a loss
    ``k2``      ``d² / 2``               biased        unbiased for the gradient of the KL, on-policy
    ``k3``      ``e^(-d) - 1 + d``       unbiased, ≥0  that of the forward KL ``KL(ref || π)``, on-policy
    ==========  =======================  ============  ==========================================================

    ``k3`` is GRPO's (Shao et al., 2024, arXiv:2402.03300, equation 4) and TRL's; OpenRLHF's default is ``k1``, in the
    reward. Times ``ρ = π/π_old`` *with* its gradient, ``k3`` has the gradient of the true KL, also off-policy
    (DeepSeek-V3.2, 2025, arXiv:2512.02556; TRL 1.16's default).

    In ``k3`` ``d`` is at least -80 nats, the last round number whose exponential float32 can hold; below that the
    estimate is constant and has no gradient.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        ref_logprobs: (B, T) under the reference, detached here.
        estimator: ``k1``, ``k2`` or ``k3``.
        clamp: Limit of the estimate in nats > 0, before the weight; beyond it there is no gradient. Off by default; 10
            in OpenRLHF, and in verl for ``k3``.
        importance_weight: (B, T) ratio ``π/π_behaviour`` to multiply by; not detached.
        mask: (B, T); entries outside become 0 in value and gradient and may hold anything. All count when ``None``.

    Returns:
        (B, T) nats per token, in at least float32.

    Raises:
        ValueError: If shapes differ, ``estimator`` is unknown or ``clamp`` is not positive.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, importance_weight=importance_weight, mask=mask)
    if estimator not in get_args(KLEstimator):
        raise ValueError(f"estimator must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}")
    if clamp is not None and not clamp > 0.0:
        raise ValueError(f"clamp must be positive or None, got {clamp}")
    policy, reference = full_precision(logprobs), full_precision(ref_logprobs.detach())
    if mask is not None:
        policy, reference = select(policy, mask), select(reference, mask)
    difference = policy - reference
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference.square() / 2
    else:
        # The cap keeps the exponential finite: its gradient under a clamp would be 0 * inf = nan. It bounds both terms:
        # were it on the exponential alone, the other would push the token further away from the reference.
        difference = difference.clamp(min=-_LARGEST_DIFFERENCE)
        estimate = torch.expm1(-difference) + difference
    if clamp is not None:
        estimate = estimate.clamp(-clamp, clamp)
    if importance_weight is not None:
        weight = full_precision(importance_weight)
        estimate = estimate * (weight if mask is None else select(weight, mask))
    return estimate


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    coef: float = 1.0,
    estimator: KLEstimator = "k3",
    clamp: float | None = None,
    importance_weight: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """KL penalty as a loss of its own, to be added to any policy loss with :func:`sum_losses`.

    ``β aggregate(kl_t)`` with ``kl_t`` of :func:`kl_estimate`.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        ref_logprobs: (B, T) under the reference, detached here.
        mask: (B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN
            included.
        coef: ``β`` ≥ 0. With 0 the KL is measured and has no gradient.
        estimator: ``k1`` (whose gradient has mean 0 unless weighted), ``k2`` or ``k3``.
        clamp: Limit of the estimate in nats; off by default.
        importance_weight: (B, T) ratio ``π/π_behaviour`` to multiply by; not detached.
        aggregation: The ``mode`` of :func:`aggregate`.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metric ``policy/ref_kl``, the mean of ``kl_t`` (nats per token).

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not coef >= 0.0:
        raise ValueError(f"coef must be 0 or more, got {coef}")
    if coef == 0.0:
        logprobs = logprobs.detach()
    kl = kl_estimate(
        logprobs, ref_logprobs, estimator=estimator, clamp=clamp, importance_weight=importance_weight, mask=mask
    )
    loss = coef * aggregate(kl, mask, aggregation, denominator, max_length=max_length)
    return LossOutput(loss if coef > 0.0 else loss.detach(), {"policy/ref_kl": masked_mean(kl.detach(), mask)})
