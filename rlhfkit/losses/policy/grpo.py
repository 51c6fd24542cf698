"""GRPO and its variants DAPO, BNPO and Dr.GRPO: PPO's clip with a KL penalty in the loss."""

from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput, full_precision, sum_losses
from rlhfkit.losses.kl import KLEstimator, kl_loss
from rlhfkit.losses.policy.base import (
    policy_tokens,
    preset_of,
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
    kl_clamp: float | None = None,
) -> LossOutput:
    """Group relative policy optimisation: :func:`ppo_loss` with a KL penalty in the loss.

    ``ℓ_t = ppo_t + β kl_t``, each sequence a mean over its own tokens; ``kl_t`` of :func:`kl_estimate`. The advantages
    come from :func:`group_advantages`.

    Shao et al. (2024, arXiv:2402.03300, equation 3). ``weights`` multiply the surrogate and not the KL, as in TRL.

    Args:
        advantages: (B,) from :func:`group_advantages`, (B, 1) or (B, T); detached here.
        aggregation: How the token losses become one number; ``sequence-mean-token-mean`` in the paper; the
            default of TRL and verl is ``token-mean``.
        ref_logprobs: (B, T) log-probs under the reference policy, needed by ``kl_coef`` > 0; with 0 the KL is only
            measured.
        kl_coef: ``β`` ≥ 0, weight of the KL penalty; 0.04 in the GRPO paper, 0 in TRL and here.
        kl_estimator: Estimator of :func:`kl_estimate`; ``k3`` in the GRPO paper.
        kl_importance_weight: Multiply the KL by the ratio ``ρ_t``, with its gradient: unbiased off-policy, TRL's
            default, see :func:`kl_estimate`. Off as in the GRPO paper.
        kl_clamp: Limit of each token's KL estimate in nats, before the weight, beyond which it has no gradient; off
            as in TRL, 10 in OpenRLHF, and in verl for ``k3``.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`; with ``ref_logprobs`` also ``policy/ref_kl`` (nats per token).

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
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
        clamp=kl_clamp,
        importance_weight=ratio,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )
    return sum_losses(surrogate, penalty)


@preset_of(grpo_loss, clip_high=0.28, aggregation="token-mean")
def dapo_loss() -> None:
    """DAPO: :func:`grpo_loss` with a wider upper clip and a mean over all tokens of the step.

    Yu et al. (2025, arXiv:2503.14476, equation 8). The other parts of DAPO are the overlong penalty
    (:class:`rlhfkit.rewards.LengthPenalty`), dynamic sampling (groups of equal rewards are rejected) and no KL penalty.

    Args:
        clip_low: ``ε_low``; the paper's 0.2.
        clip_high: ``ε_high``; the paper's 0.28, 0.2 in TRL.
        aggregation: How the token losses become one number; the paper's ``token-mean``.
        ref_logprobs, kl_coef, kl_estimator, kl_importance_weight, kl_clamp: See :func:`grpo_loss`.
        dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`grpo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(dapo_loss, fixed={"denominator": None}, clip_high=0.2)
def bnpo_loss() -> None:
    """Batch-normalised token mean: :func:`grpo_loss` averaged over the tokens of this micro-batch alone.

    TRL's ``bnpo``, here for comparison: a token weighs more in a micro-batch with few tokens, unlike in
    :func:`dapo_loss` with a ``denominator``.

    Args:
        ref_logprobs, kl_coef, kl_estimator, kl_importance_weight, kl_clamp: See :func:`grpo_loss`.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, aggregation, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`grpo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(grpo_loss, aggregation="constant-length")
def dr_grpo_loss() -> None:
    """Dr.GRPO: :func:`grpo_loss` in which token losses are summed and divided by a constant length.

    Liu et al. (2025, arXiv:2503.20783, section 3.1), together with ``group_advantages(..., scale="none")``. The length
    of an answer then changes neither the sign nor the size of the gradients of its tokens.

    Args:
        aggregation: How the token losses become one number; the paper's ``constant-length``.
        denominator: Sequences of the whole optimizer step, divided by the number of micro-batches that are averaged; B
            when ``None``.
        max_length: Tokens; the generation limit, as in the paper and TRL. Required.
        ref_logprobs, kl_coef, kl_estimator, kl_importance_weight, kl_clamp: See :func:`grpo_loss`.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`grpo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
