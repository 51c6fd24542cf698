"""Policy losses with another trust region than a clip around the old policy: decoupled PPO, DPPO, Clip-Cov, KL-Cov."""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    check_same_shape,
    full_precision,
    masked_mean,
    select,
)
from rlhfkit.losses.importance_sampling import CorrectionLevel, CorrectionMode, importance_weights
from rlhfkit.losses.policy.base import (
    PolicyTokens,
    TokenLosses,
    check_clip,
    clip_fractions,
    clip_metrics,
    clipped_surrogate,
    loss_of_tokens,
    per_token,
    policy_loss_output,
    policy_tokens,
)
from rlhfkit.losses.policy.ppo import ppo_loss


def decoupled_ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    level: CorrectionLevel = "token",
    mode: CorrectionMode = "mask",
    low: float | None = None,
    high: float | None = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Decoupled PPO: the clip is around a recent *proximal* policy, not around the older one that sampled.

    ``w_t = π_prox(y_t) / μ(y_t)`` bounded by :func:`importance_weights`, detached; ``ℓ_t = w_t ppo_t(π, π_prox)``.

    Hilton et al. (2021, arXiv:2110.00641); AReaL (Fu et al., 2025, arXiv:2505.24298) for asynchronous runs, dropping
    tokens of weight above 5. The proximal log-probs are recomputed before the iteration, or approximated by
    :func:`log_linear_proximal_logprobs`.

    Args:
        old_logprobs: (B, T) under the proximal policy, the policy before this iteration; detached here.
        rollout_logprobs: (B, T) the engine's, under the policies that sampled; where NaN (not given), the weight is 1.
        level: ``token``, ``sequence`` or ``geometric``, see :func:`importance_weights`.
        mode: ``truncate``, ``clip``, ``mask`` or ``none``, see :func:`importance_weights`.
        low: Lower bound of ``w_t``; none when ``None``.
        high: Upper bound of ``w_t``; AReaL's 5.
        weights: Further factors, (B, T), (B, 1) or (B,), which multiply ``w_t``; detached here.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, advantages, mask, aggregation, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss` and of :func:`importance_weights`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    correction = importance_weights(old_logprobs, rollout_logprobs, mask, level=level, mode=mode, low=low, high=high)
    factors = correction.weights
    if weights is not None:
        factors = factors * per_token(full_precision(weights.detach()), factors, "weights")
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
        weights=factors,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )
    return LossOutput(surrogate.loss, {**surrogate.metrics, **correction.metrics}, surrogate.tokens)


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    two_sided: bool = False,
    log_ratio_coef: float = 1e-3,
    log_ratio_clamp: float | None = 20.0,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """DPPO with the binary total variation, plus a squared log-ratio: prime-rl's default objective.

    ``d_t = π(y_t) - μ(y_t)``; ``keep_t = 0`` where ``A_t > 0 and d_t > D_high``, or ``A_t < 0 and d_t < -D_low``, else
    1; ``ℓ_t = -keep_t ρ_t A_t + τ (log ρ_t)²``, ``ρ_t = π(y_t) / μ(y_t)``; then :func:`aggregate`.

    Qi et al. ("Rethinking the Trust Region in LLM Reinforcement Learning", 2026, arXiv:2602.04879); the squared
    log-ratio is prime-rl's. A bound on the *difference* of probabilities allows large ratios of rare tokens and
    restricts likely ones, unlike PPO's clip. ``μ`` is the policy that sampled: one bound covers staleness and the
    mismatch of engine and trainer.

    Args:
        old_logprobs: (B, T) under the trainer's policy before this iteration, for the metrics and in place of missing
            ``rollout_logprobs``; detached here.
        rollout_logprobs: (B, T) under the policy that sampled, as the engine gave them; NaN where it gave none.
        mask_low: ``D_low`` in [0, 1]; 0.2 in prime-rl.
        mask_high: ``D_high`` in [0, 1]; 0.2 in prime-rl.
        two_sided: Drop a token beyond either bound, whatever the sign of its advantage, so one that returns towards
            ``μ`` too: prime-rl's ``ipo``, its default before this loss.
        log_ratio_coef: ``τ`` ≥ 0; 1e-3 in prime-rl. It pulls dropped tokens back.
        log_ratio_clamp: Limit of each token's log-ratio in nats, beyond which it has no gradient; none in prime-rl.
        logprobs, advantages, mask, weights, aggregation, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output`; ``policy/clip_fraction`` (and ``_low``, ``_high``)
        counts dropped tokens.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not (0.0 <= mask_low <= 1.0 and 0.0 <= mask_high <= 1.0):
        raise ValueError(f"mask_low and mask_high bound probabilities, in [0, 1], got {mask_low} and {mask_high}")

    if not log_ratio_coef >= 0.0:
        raise ValueError(f"log_ratio_coef must be 0 or more, got {log_ratio_coef}")
    logprobs = full_precision(logprobs)
    measured = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    sampled = torch.where(rollout_logprobs.isnan(), old_logprobs, rollout_logprobs).detach()
    tokens = policy_tokens(logprobs, sampled, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    moved = tokens.logprobs.detach().exp() - select(full_precision(sampled), mask).exp()
    too_low, too_high = moved < -mask_low, moved > mask_high
    if not two_sided:
        too_low, too_high = too_low & (tokens.advantages < 0.0), too_high & (tokens.advantages > 0.0)
    token_loss = -select(tokens.ratio * tokens.advantages, ~(too_high | too_low))
    if log_ratio_coef > 0.0:
        token_loss = token_loss + log_ratio_coef * tokens.log_ratio.square()
    return policy_loss_output(
        token_loss,
        measured,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        metrics=clip_fractions(too_low, too_high, tokens.mask),
    )


@loss_of_tokens(aggregation="token-mean")
def clip_cov_loss(
    tokens: PolicyTokens,
    *,
    fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    priority: Tensor | None = None,
) -> TokenLosses:
    """Clip-Cov: :func:`ppo_loss` without the gradient of a few tokens that reduce the entropy most.

    ``cov_t = (A_t - mean A)(log π(y_t) - mean log π)``. Of the tokens that PPO does not clip and whose ``cov_t`` lies
    between the bounds, ``max(1, ⌊fraction n⌋)`` of all n are drawn at random; their loss is 0 and they still count in
    the mean.

    Cui et al. (2025, arXiv:2505.22617), defaults of verl. Means and counts are those of this call, so the loss depends
    on how a step is split.

    Args:
        fraction: Share of tokens to take the gradient from, in (0, 1].
        covariance_low: Lower bound of the covariance of candidates.
        covariance_high: Upper bound.
        priority: (B, T) random numbers; candidates with the largest are drawn. From torch's generator when ``None``.
        clip_low, clip_high: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, log_ratio_clamp, weights, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss` and ``policy/covariance_fraction``, the share of tokens drawn.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_clip(clip_low, clip_high)
    _check_fraction(fraction)
    if not covariance_low < covariance_high:
        raise ValueError(f"need covariance_low < covariance_high, got {covariance_low} and {covariance_high}")
    if priority is not None and priority.shape != tokens.mask.shape:
        raise ValueError(f"priority must be {tuple(tokens.mask.shape)} like the mask, got {tuple(priority.shape)}")
    ratio = tokens.ratio
    token_loss = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    clipped = token_loss.detach() > -ratio.detach() * tokens.advantages
    covariance = _covariance(tokens)
    candidates = (covariance > covariance_low) & (covariance < covariance_high) & tokens.mask & ~clipped
    scores = torch.rand_like(covariance) if priority is None else priority.to(covariance.dtype)
    drawn = _largest(scores, candidates, _share(tokens.mask, fraction))
    metrics = clip_metrics(ratio, tokens, clip_low, clip_high)
    metrics["policy/covariance_fraction"] = masked_mean(drawn.float(), tokens.mask)
    return select(token_loss, ~drawn), metrics


@loss_of_tokens(aggregation="token-mean")
def kl_cov_loss(
    tokens: PolicyTokens,
    *,
    fraction: float = 2e-4,
    kl_coef: float = 1.0,
) -> TokenLosses:
    """KL-Cov: the unclipped surrogate with a KL penalty on the few tokens that reduce the entropy most.

    ``ℓ_t = -ρ_t A_t``, plus ``β |log π(y_t) - log π_old(y_t)|`` for the ``max(1, ⌊fraction n⌋)`` tokens of largest
    ``cov_t = (A_t - mean A)(log π(y_t) - mean log π)``; then :func:`aggregate`.

    Cui et al. (2025, arXiv:2505.22617), defaults of verl. Means and counts are those of this call, so the loss depends
    on how a step is split.

    Args:
        fraction: Share of tokens to penalise, in (0, 1].
        kl_coef: ``β`` ≥ 0.
        logprobs, old_logprobs, advantages, mask, log_ratio_clamp, weights, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output` and ``policy/covariance_fraction``, the share of tokens
        penalised.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    _check_fraction(fraction)
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef must be 0 or more, got {kl_coef}")
    penalised = _largest(_covariance(tokens), tokens.mask, _share(tokens.mask, fraction))
    token_loss = -tokens.ratio * tokens.advantages + select(kl_coef * tokens.log_ratio.abs(), penalised)
    return token_loss, {"policy/covariance_fraction": masked_mean(penalised.float(), tokens.mask)}


def log_linear_proximal_logprobs(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    versions: Tensor,
    *,
    version: int,
    proximal_version: int | None = None,
) -> Tensor:
    """Approximate log-probs of the proximal policy of decoupled PPO, without a forward pass.

    ``log π_prox = log μ + α (log π - log μ)``, ``α = (v_prox - v_μ) / (v_π - v_μ)``, in [0, 1].

    AReaL's ``loglinear`` approximation (Fu et al., 2025, arXiv:2505.24298), linear between two policy versions.

    Args:
        logprobs: (B, T) under the policy of ``version``; detached here.
        rollout_logprobs: (B, T) under the policies that sampled.
        versions: (B, T) integers, policy version that sampled each token; any value outside the action mask.
        version: Current policy version.
        proximal_version: Version whose log-probs are wanted; ``version - 1`` when ``None``.

    Returns:
        (B, T) detached, in at least float32. Tokens that the current version sampled keep ``rollout_logprobs``.

    Raises:
        ValueError: If the shapes differ or ``proximal_version`` is newer than ``version``.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, versions=versions)
    proximal = version - 1 if proximal_version is None else proximal_version
    if proximal > version:
        raise ValueError(f"proximal_version {proximal} lies ahead of version {version}")
    sampled, current = full_precision(rollout_logprobs.detach()), full_precision(logprobs.detach())
    age = (version - versions).to(sampled.dtype)
    share = ((proximal - versions).to(sampled.dtype) / age.clamp(min=1.0)).clamp(0.0, 1.0)
    return torch.where(age > 0.0, torch.lerp(sampled, current, share), sampled)


def _check_fraction(fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")


def _covariance(tokens: PolicyTokens) -> Tensor:
    logprobs = tokens.logprobs.detach()
    centred = tokens.advantages - masked_mean(tokens.advantages, tokens.mask)
    return centred * (logprobs - masked_mean(logprobs, tokens.mask))


def _share(mask: Tensor, fraction: float) -> Tensor:
    return (mask.sum() * fraction).floor().clamp(min=1)


def _largest(scores: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """Mask of the ``count`` candidates with the largest scores, without a host sync."""
    ranked = select(scores, candidates, fill=-torch.inf).flatten().argsort(descending=True, stable=True)
    position = torch.zeros_like(ranked).scatter(0, ranked, torch.arange(ranked.numel(), device=ranked.device))
    return (position.view_as(scores) < count) & candidates
