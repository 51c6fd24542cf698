"""Policy gradients on ``A log π``: REINFORCE and GPG without a ratio, CISPO with a detached one, SAPO with a soft one.

Where PPO takes the gradient of a clipped token away, these keep one for every token. Shapes and conventions are those
of :mod:`rlhfkit.losses.policy.ppo`.
"""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput, masked_mean
from rlhfkit.losses.policy.base import RatioLevel, policy_loss_output, policy_tokens


def reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    aggregation: Aggregation = "sequence-mean-token-sum",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """REINFORCE: the plain policy gradient.

    ``ℓ_t = -A_t log π(y_t)``, then :func:`aggregate`.

    Williams (1992), whose gradient is the mean over sequences of the sum over tokens, the default here. ``weights``
    from :func:`importance_weights` make it off-policy.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        old_logprobs: (B, T) under the policy before this iteration. No part of the loss: the metrics say how far the
            policy has moved from it.
        advantages: (B, T), (B, 1) or (B,); detached here.
        mask: (B, T), true where the policy chose the token and it is trained on.
        weights: (B, T), (B, 1) or (B,) factors of the loss; detached here.
        aggregation: How tokens become one number.
        denominator: Sequences (tokens for ``token-mean``) of the whole optimizer step, see :func:`aggregate`.
        max_length: Tokens; only for ``aggregation="constant-length"``.

    Returns:
        The loss, whose value means nothing, with the metrics every policy loss has.

    Raises:
        ValueError: If shapes do not fit or a knob is unknown.
    """
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask)
    return policy_loss_output(
        -tokens.advantages * tokens.logprobs,
        tokens,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )


def gpg_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Group policy gradient: :func:`reinforce_loss` with the mean over all tokens.

    Chu et al. (2025, arXiv:2504.02546), with the advantages of :func:`gpg_advantages`. They contain the paper's factor
    ``B / (B - M)`` for the M of B samples without a gradient, which are counted over the whole batch and so cannot be
    known to a loss that sees a part of it.

    Args:
        logprobs: As in :func:`reinforce_loss`.
        old_logprobs: As in :func:`reinforce_loss`.
        advantages: As in :func:`reinforce_loss`.
        mask: As in :func:`reinforce_loss`.
        weights: As in :func:`reinforce_loss`.
        aggregation: The paper's ``token-mean``.
        denominator: Tokens of the whole optimizer step, see :func:`aggregate`.
        max_length: As in :func:`reinforce_loss`.

    Returns:
        As :func:`reinforce_loss`.

    Raises:
        ValueError: If shapes do not fit.
    """
    return reinforce_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
    log_ratio_clamp: float | None = 20.0,
    ratio_level: RatioLevel = "token",
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """CISPO: REINFORCE with a clipped importance ratio as weight, so that clipped tokens keep a gradient.

    ``ℓ_t = -sg(clip(ρ_t, ρ_min, ρ_max)) A_t log π(y_t)``, then :func:`aggregate`.

    MiniMax-M1 (2025, arXiv:2506.13585), no lower bound as there; the cap 5 is of ScaleRL (Khatri et al.,
    2025, arXiv:2510.13786). The bounds are those of the ratio itself, as in TRL; a peer's ``1 + ε_high`` is
    ``ratio_max=1.28``. TRL's default cap 0.2 is left over from PPO and not meant.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`.
        mask: As in :func:`ppo_loss`.
        ratio_min: ``ρ_min`` ≥ 0.
        ratio_max: ``ρ_max`` > ``ρ_min``.
        log_ratio_clamp: As in :func:`ppo_loss`.
        ratio_level: Whose ratio weighs, see :func:`ppo_loss`.
        weights: As in :func:`ppo_loss`.
        aggregation: How tokens become one number; the paper's ``token-mean``.
        denominator: As in :func:`ppo_loss`.
        max_length: As in :func:`ppo_loss`.

    Returns:
        The loss with the metrics every policy loss has; ``policy/clip_fraction`` (and ``_low``, ``_high``) counts
        tokens whose weight was clipped.

    Raises:
        ValueError: If shapes do not fit or a knob is out of range.
    """
    if not 0.0 <= ratio_min < ratio_max:
        raise ValueError(f"need 0 <= ratio_min < ratio_max, got ratio_min={ratio_min} and ratio_max={ratio_max}")
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    ratio = tokens.ratio_of(ratio_level).detach()
    low = masked_mean((ratio < ratio_min).float(), tokens.mask)
    high = masked_mean((ratio > ratio_max).float(), tokens.mask)
    return policy_loss_output(
        -ratio.clamp(ratio_min, ratio_max) * tokens.advantages * tokens.logprobs,
        tokens,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        metrics={
            "policy/clip_fraction": low + high,
            "policy/clip_fraction_low": low,
            "policy/clip_fraction_high": high,
        },
    )


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    log_ratio_clamp: float | None = 20.0,
    ratio_level: RatioLevel = "token",
    weights: Tensor | None = None,
    aggregation: Aggregation = "sequence-mean-token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """SAPO: a smooth gate in place of the clip, which fades the gradient out as the ratio leaves 1.

    ``ℓ_t = -A_t σ(τ (ρ_t - 1)) 4/τ``, ``τ = τ_pos`` where ``A_t > 0`` and ``τ_neg`` elsewhere; then :func:`aggregate`.
    At ``ρ = 1`` its gradient is that of PPO.

    Gao et al. (Qwen, 2025, arXiv:2511.20347), whose aggregation and temperatures are the defaults.

    Args:
        logprobs: As in :func:`ppo_loss`.
        old_logprobs: As in :func:`ppo_loss`.
        advantages: As in :func:`ppo_loss`.
        mask: As in :func:`ppo_loss`.
        temperature_positive: ``τ_pos`` > 0; larger fades faster.
        temperature_negative: ``τ_neg`` > 0; a little larger, since negative updates spread over the whole vocabulary.
        log_ratio_clamp: As in :func:`ppo_loss`.
        ratio_level: Whose ratio is gated, see :func:`ppo_loss`.
        weights: As in :func:`ppo_loss`.
        aggregation: How tokens become one number.
        denominator: As in :func:`ppo_loss`: sequences with this aggregation.
        max_length: As in :func:`ppo_loss`.

    Returns:
        The loss with the metrics every policy loss has.

    Raises:
        ValueError: If shapes do not fit or a temperature is not positive.
    """
    if not (temperature_positive > 0.0 and temperature_negative > 0.0):
        raise ValueError(f"temperatures must be positive, got {temperature_positive} and {temperature_negative}")
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    temperature = torch.where(
        tokens.advantages > 0.0,
        torch.full_like(tokens.advantages, temperature_positive),
        torch.full_like(tokens.advantages, temperature_negative),
    )
    gate = torch.sigmoid(temperature * (tokens.ratio_of(ratio_level) - 1.0)) * (4.0 / temperature)
    return policy_loss_output(
        -tokens.advantages * gate,
        tokens,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
    )
