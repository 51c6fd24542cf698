"""Policy losses without a hard clip: REINFORCE and GPG (no ratio), CISPO (detached ratio) and SAPO (soft gate).

Where PPO removes the gradient of a clipped token, these keep one for every token.
"""

import torch

from rlhfkit.losses.policy.base import (
    PolicyTokens,
    RatioLevel,
    TokenLosses,
    clip_fractions,
    loss_of_tokens,
    preset_of,
)


@loss_of_tokens(aggregation="sequence-mean-token-sum")
def reinforce_loss(
    tokens: PolicyTokens,
) -> TokenLosses:
    """REINFORCE: the plain policy gradient.

    ``ℓ_t = -A_t log π(y_t)``, then :func:`aggregate`.

    Williams (1992): the mean over sequences of the sum over tokens, the default. ``weights`` from
    :func:`importance_weights` make it off-policy.

    Args:
        old_logprobs: (B, T) under the policy before this iteration, only for the metrics.
        logprobs, advantages, mask, log_ratio_clamp, weights, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss, whose value has no meaning of its own, with the metrics of :func:`policy_loss_output`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    return -tokens.advantages * tokens.logprobs, {}


@preset_of(reinforce_loss, aggregation="token-mean")
def gpg_loss() -> None:
    """Group policy gradient: :func:`reinforce_loss` with the mean over all tokens.

    Chu et al. (2025, arXiv:2504.02546), with the advantages of :func:`gpg_advantages`, which contain the paper's
    factor.

    Args:
        old_logprobs: (B, T) under the policy before this iteration, only for the metrics.
        aggregation: How the token losses become one number; the paper's ``token-mean``.
        logprobs, advantages, mask, log_ratio_clamp, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@loss_of_tokens(aggregation="token-mean")
def cispo_loss(
    tokens: PolicyTokens,
    *,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
    ratio_level: RatioLevel = "token",
) -> TokenLosses:
    """CISPO: REINFORCE with a clipped importance ratio as weight, so that clipped tokens keep a gradient.

    ``ℓ_t = -sg(clip(ρ_t, ρ_min, ρ_max)) A_t log π(y_t)``, then :func:`aggregate`.

    MiniMax-M1 (2025, arXiv:2506.13585), without a lower bound.

    Args:
        ratio_min: ``ρ_min`` ≥ 0.
        ratio_max: ``ρ_max`` > ``ρ_min``; 5 in ScaleRL (Khatri et al., 2025, arXiv:2510.13786). Bounds the ratio itself,
            as in TRL (whose default 0.2 is left over from PPO); a peer's ``1 + ε_high`` is ``ratio_max=1.28``.
        aggregation: How the token losses become one number; the paper's ``token-mean``.
        log_ratio_clamp, ratio_level: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output`; ``policy/clip_fraction`` (and ``_low``, ``_high``)
        counts tokens whose weight was clipped.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not 0.0 <= ratio_min < ratio_max:
        raise ValueError(f"need 0 <= ratio_min < ratio_max, got ratio_min={ratio_min} and ratio_max={ratio_max}")
    ratio = tokens.ratio_of(ratio_level).detach()
    metrics = clip_fractions(ratio < ratio_min, ratio > ratio_max, tokens.mask)
    return -ratio.clamp(ratio_min, ratio_max) * tokens.advantages * tokens.logprobs, metrics


@loss_of_tokens(aggregation="sequence-mean-token-mean")
def sapo_loss(
    tokens: PolicyTokens,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
    ratio_level: RatioLevel = "token",
) -> TokenLosses:
    """SAPO: a smooth gate in place of the clip, which reduces the gradient as the ratio leaves 1.

    ``ℓ_t = -A_t σ(τ (ρ_t - 1)) 4/τ``, ``τ = τ_pos`` where ``A_t > 0`` and ``τ_neg`` elsewhere; then :func:`aggregate`.
    At ``ρ = 1`` its gradient is that of PPO.

    Gao et al. (Qwen, 2025, arXiv:2511.20347), whose aggregation and temperatures are the defaults.

    Args:
        temperature_positive: ``τ_pos`` > 0; the larger, the faster the gradient falls off.
        temperature_negative: ``τ_neg`` > 0; a little larger, since negative updates spread over the whole vocabulary.
        log_ratio_clamp, ratio_level: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not (temperature_positive > 0.0 and temperature_negative > 0.0):
        raise ValueError(f"temperatures must be positive, got {temperature_positive} and {temperature_negative}")
    temperature = torch.where(
        tokens.advantages > 0.0,
        torch.full_like(tokens.advantages, temperature_positive),
        torch.full_like(tokens.advantages, temperature_negative),
    )
    gate = torch.sigmoid(temperature * (tokens.ratio_of(ratio_level) - 1.0)) * (4.0 / temperature)
    return -tokens.advantages * gate, {}
