"""GRPO and its variants DAPO, BNPO and Dr.GRPO: PPO's clip, advantages of a group, and a KL penalty in the loss."""

from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput, full_precision, sum_losses
from rlhfkit.losses.kl import KLEstimator, kl_loss
from rlhfkit.losses.policy.base import (
    policy_tokens,
)
from rlhfkit.losses.policy.ppo import ppo_loss


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "sequence-mean-token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
) -> LossOutput:
    """Group relative policy optimisation: :func:`ppo_loss` with a KL penalty in the loss.

    ``ℓ_t = ppo_t + β kl_t``, each sequence a mean over its own tokens; ``kl_t`` of :func:`kl_estimate`. The advantages
    come from :func:`group_advantages`.

    Shao et al. (2024, arXiv:2402.03300, equation 3), whose aggregation is the default; TRL's and verl's is
    ``token-mean``. ``weights`` multiply the surrogate and leave the KL alone, as in TRL.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`; (B,) from :func:`group_advantages`.
        mask: As in :func:`ppo_loss`.
        clip_low: As in :func:`ppo_loss`.
        clip_high: As in :func:`ppo_loss`.
        dual_clip: As in :func:`ppo_loss`.
        log_ratio_clamp: As in :func:`ppo_loss`.
        delta: As in :func:`ppo_loss`.
        weights: As in :func:`ppo_loss`.
        aggregation: The paper's ``sequence-mean-token-mean``.
        denominator: As in :func:`ppo_loss`: sequences with this aggregation.
        max_length: As in :func:`ppo_loss`.
        ref_logprobs: (B, T) under the reference policy. With ``kl_coef=0`` they are only measured.
        kl_coef: ``β`` ≥ 0; 0.04 in the paper, 0 in TRL and here.
        kl_estimator: ``k3`` in the paper.
        kl_importance_weight: Multiply ``kl_t`` by the ratio ``ρ_t``, through which gradient flows, which makes it hold
            off-policy (DeepSeek-V3.2, arXiv:2512.02556; TRL's default). The paper has no such factor, nor has this.

    Returns:
        The loss with the metrics of :func:`ppo_loss`; with ``ref_logprobs`` also ``policy/ref_kl`` (nats per token).

    Raises:
        ValueError: If shapes do not fit, a knob is out of range, or ``kl_coef`` lacks its ``ref_logprobs``.
    """
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef must be 0 (no penalty) or more, got {kl_coef}")
    if kl_coef > 0.0 and ref_logprobs is None:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs, the log-probs under the reference policy")
    # Once for all terms: their gradients are added in float32 and rounded to half precision once.
    logprobs = full_precision(logprobs)
    surrogate = ppo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        delta=delta,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )
    if ref_logprobs is None:
        return surrogate
    ratio = None
    if kl_importance_weight:
        ratio = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp).ratio
    penalty = kl_loss(
        logprobs,
        ref_logprobs,
        mask,
        coef=kl_coef,
        estimator=kl_estimator,
        importance_weight=ratio,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )
    return sum_losses(surrogate, penalty)


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
) -> LossOutput:
    """DAPO: :func:`grpo_loss` that clips higher above and gives every token of the step the same weight.

    Yu et al. (2025, arXiv:2503.14476, equation 8). Its other parts are the overlong penalty
    (:func:`overlong_penalty`), dynamic sampling (leaving out groups of equal rewards) and no KL.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`.
        mask: As in :func:`ppo_loss`.
        clip_low: The paper's 0.2.
        clip_high: The paper's 0.28; 0.2 in TRL.
        dual_clip: As in :func:`ppo_loss`.
        log_ratio_clamp: As in :func:`ppo_loss`.
        delta: As in :func:`ppo_loss`.
        weights: As in :func:`grpo_loss`.
        aggregation: The paper's ``token-mean``.
        denominator: Tokens of the whole optimizer step over the number of micro-batches averaged; without it the tokens
            of this micro-batch, which is :func:`bnpo_loss`.
        max_length: As in :func:`ppo_loss`.
        ref_logprobs: As in :func:`grpo_loss`.
        kl_coef: As in :func:`grpo_loss`.
        kl_estimator: As in :func:`grpo_loss`.
        kl_importance_weight: As in :func:`grpo_loss`.

    Returns:
        As :func:`grpo_loss`.

    Raises:
        ValueError: As :func:`grpo_loss`.
    """
    return grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        delta=delta,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        ref_logprobs=ref_logprobs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_importance_weight=kl_importance_weight,
    )


def bnpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    max_length: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
) -> LossOutput:
    """Batch-normalised token mean: :func:`grpo_loss` over the tokens of this micro-batch, whatever the step holds.

    TRL's ``bnpo``. The only loss here that depends on how a step is split into micro-batches: a token in a short one
    weighs more. It exists for comparison; :func:`dapo_loss` with a ``denominator`` is the same without that.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`.
        mask: As in :func:`ppo_loss`.
        clip_low: As in :func:`ppo_loss`.
        clip_high: As in :func:`ppo_loss`.
        dual_clip: As in :func:`ppo_loss`.
        log_ratio_clamp: As in :func:`ppo_loss`.
        delta: As in :func:`ppo_loss`.
        weights: As in :func:`grpo_loss`.
        aggregation: As in :func:`ppo_loss`.
        max_length: As in :func:`ppo_loss`.
        ref_logprobs: As in :func:`grpo_loss`.
        kl_coef: As in :func:`grpo_loss`.
        kl_estimator: As in :func:`grpo_loss`.
        kl_importance_weight: As in :func:`grpo_loss`.

    Returns:
        As :func:`grpo_loss`.

    Raises:
        ValueError: As :func:`grpo_loss`.
    """
    return dapo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        delta=delta,
        weights=weights,
        aggregation=aggregation,
        max_length=max_length,
        ref_logprobs=ref_logprobs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_importance_weight=kl_importance_weight,
    )


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "constant-length",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
) -> LossOutput:
    """Dr.GRPO: :func:`grpo_loss` in which sequences are summed and divided by a constant, not by their own length.

    Liu et al. (2025, arXiv:2503.20783, section 3.1), together with ``group_advantages(..., scale="none")``. The length
    of an answer then changes neither the sign nor the size of its tokens' gradients.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`.
        mask: As in :func:`ppo_loss`.
        clip_low: As in :func:`ppo_loss`.
        clip_high: As in :func:`ppo_loss`.
        dual_clip: As in :func:`ppo_loss`.
        log_ratio_clamp: As in :func:`ppo_loss`.
        delta: As in :func:`ppo_loss`.
        weights: As in :func:`grpo_loss`.
        aggregation: The paper's ``constant-length``.
        denominator: Sequences of the whole optimizer step over the number of micro-batches averaged; B when ``None``.
        max_length: Tokens; the generation limit, in the paper and in TRL. It has to be given.
        ref_logprobs: As in :func:`grpo_loss`.
        kl_coef: As in :func:`grpo_loss`.
        kl_estimator: As in :func:`grpo_loss`.
        kl_importance_weight: As in :func:`grpo_loss`.

    Returns:
        As :func:`grpo_loss`.

    Raises:
        ValueError: As :func:`grpo_loss`; if ``max_length`` is missing.
    """
    if aggregation == "constant-length" and max_length is None:
        raise ValueError("dr_grpo_loss divides by max_length, the generation limit in tokens: give max_length=...")
    return grpo_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        log_ratio_clamp=log_ratio_clamp,
        delta=delta,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        ref_logprobs=ref_logprobs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_importance_weight=kl_importance_weight,
    )
