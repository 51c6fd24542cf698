"""Policy losses whose ratio is taken token by token: PPO, GRPO and what differs from them by a line.

All policy losses, here and in the files beside this one, are called in one way, and any of them is the ``policy_loss``
of a module::

    loss(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)

and take ``rollout_logprobs`` (the engine's) or ``ref_logprobs`` (the reference's) as keywords where they need them.
Log-probs are on the next-token axis (``logprobs[:, t]`` belongs to token t+1), shapes (B, T) for B sequences and T
tokens, in any floating dtype; masked entries may hold anything. ``denominator`` makes the gradient of an optimizer step
independent of how it is split over micro-batches and ranks, see :func:`rlhfkit.losses.aggregate`.
"""

from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput, full_precision, sum_losses
from rlhfkit.losses.kl import KLEstimator, kl_loss
from rlhfkit.losses.policy.surrogate import (
    RatioLevel,
    check_clip,
    clip_metrics,
    clipped_surrogate,
    policy_loss_output,
    policy_tokens,
)


def ppo_loss(
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
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    ratio_level: RatioLevel = "token",
) -> LossOutput:
    """Clipped surrogate of proximal policy optimisation.

    ``ρ_t = exp(clamp(log π(y_t) - log π_old(y_t), ±20))``,
    ``ℓ_t = -min(min(ρ_t, δ) A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t)``, where ``A_t < 0`` also ``ℓ_t ≤ -c A_t``; then
    ``w_t ℓ_t`` and :func:`aggregate`.

    Schulman et al. (2017, arXiv:1707.06347, equation 7). Two clip widths: DAPO (Yu et al., 2025, arXiv:2503.14476).
    Dual clip ``c``: Ye et al. (2019, arXiv:1912.09729, equation 5). Upper bound ``δ`` of the unclipped ratio:
    INTELLECT-2 (2025, arXiv:2505.07291). With three policies see :func:`decoupled_ppo_loss`.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        old_logprobs: (B, T) under the policy before this iteration (``logprobs.detach()`` in its first update).
        advantages: (B, T), or (B, 1) or (B,) when all tokens of a sequence share one.
        mask: (B, T), true where the policy chose the token and it is trained on.
        clip_low: ``ε_low`` in [0, 1]; 0.2 everywhere.
        clip_high: ``ε_high`` ≥ 0; 0.2 in PPO, 0.28 in DAPO.
        dual_clip: ``c`` > 1, the largest ratio at a negative advantage; off by default as in OpenRLHF, 3 in verl.
        log_ratio_clamp: Limit of the log-ratio in nats (OpenRLHF's and verl's 20); ``None`` for none.
        delta: ``δ`` ≥ 1 + ``ε_high``; off by default, 4 in INTELLECT-2.
        weights: (B, T), (B, 1) or (B,) factors of the clipped loss, e.g. importance correction; detached here.
        aggregation: How tokens become one number; ``token-mean`` as OpenRLHF and verl.
        denominator: Tokens (sequences for the other aggregations) of the whole optimizer step over the number of
            micro-batches averaged; the local count when ``None``.
        max_length: Tokens; only for ``aggregation="constant-length"``.
        ratio_level: Whose ratio is clipped: ``token``; ``sequence`` is :func:`gspo_loss`, ``sequence-sum``
            :func:`rloo_loss`.

    Returns:
        The loss with metrics ``policy/clip_fraction`` (and ``_low``, ``_high``: tokens that lost their gradient at
        either side), ``policy/approx_kl`` (k3 of old to new), ``policy/ppo_kl`` (k1, under verl's name),
        ``policy/ratio_mean``, ``policy/ratio_max``.

    Raises:
        ValueError: If shapes do not fit or a knob is unknown or out of range.
    """
    check_clip(clip_low, clip_high, dual_clip, delta)
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    ratio = tokens.ratio_of(ratio_level)
    token_loss = clipped_surrogate(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta
    )
    return policy_loss_output(
        token_loss,
        tokens,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        metrics=clip_metrics(ratio, tokens, clip_low, clip_high),
    )


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
