"""Policy losses whose ratio belongs to a whole sequence: GSPO, GSPO-token, LUSPO, GMPO, RLOO and VESPO.

The ratio of a single token is a noisy estimate from one draw; these weight or clip all tokens of a sequence together.
"""

import math

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput, full_precision, masked_mean, masked_sum, select
from rlhfkit.losses.metrics import mean_metric
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
    preset_of,
)
from rlhfkit.losses.policy.ppo import ppo_loss

_SMALLEST_LOG_WEIGHT = math.log(1e-8)


def check_advantages_of_sequences(advantages: Tensor, mask: Tensor, name: str) -> None:
    """Raise ValueError if the selected tokens of a sequence have different advantages; waits for a device.

    Args:
        advantages: (B, T).
        mask: (B, T), true where a token counts.
        name: The loss, which has one ratio for a sequence.
    """
    largest = select(advantages, mask, -math.inf).amax(-1)
    smallest = select(advantages, mask, math.inf).amin(-1)
    if bool((largest > smallest).any()):
        raise ValueError(
            f"{name} has one ratio for a sequence and takes one advantage for it, and the advantages differ between "
            "the tokens of a sequence, which it would average: use gspo_token_loss"
        )


_ONE_CLIP = {"dual_clip": None, "delta": None}


@preset_of(
    ppo_loss,
    fixed={"ratio_level": "sequence", **_ONE_CLIP},
    clip_low=3e-4,
    clip_high=4e-4,
    aggregation="sequence-mean-token-mean",
)
def gspo_loss() -> None:
    """Group sequence policy optimisation: PPO's clip on the length-normalised ratio of the sequence.

    ``s = exp(mean_t (log π(y_t) - log π_old(y_t)))``, ``ℓ_t = -min(s A_t, clip(s, 1 - ε_low, 1 + ε_high) A_t)``.

    Zheng et al. (2025, arXiv:2507.18071, equation 5). The mean over thousands of tokens moves far less than a token, so
    the 0.2 of OpenRLHF and TRL never clips. With one advantage per sequence the mean over its tokens is the paper's one
    term.

    Args:
        advantages: (B,) or (B, 1), detached here. Those of a sequence's tokens, (B, T), are averaged in the gradient,
            as in OpenRLHF; :func:`gspo_token_loss` gives each token its own, and modules refuse them here.
        clip_low: ``ε_low``; 3e-4 in section 5.1 of the paper.
        clip_high: ``ε_high``; 4e-4 there.
        log_ratio_clamp: Limit of each token's log-ratio in nats, before the mean; no limit when ``None``.
        aggregation: How the token losses become one number. verl always takes this one.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`; ``policy/clip_fraction`` counts the tokens of clipped sequences.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(gspo_loss, aggregation="sequence-mean-token-sum")
def luspo_loss() -> None:
    """Length-unbiased GSPO: :func:`gspo_loss` times the length of each sequence.

    ``mean_i |y_i| min(s_i A_i, clip(s_i) A_i)``, that is GSPO summed over tokens.

    Liu et al. (2026, arXiv:2602.05261): GSPO gives the tokens of long answers less weight, so answers shrink in
    training.

    Args:
        advantages: (B,) or (B, 1), detached here.
        clip_low: ``ε_low``; GSPO's 3e-4.
        clip_high: ``ε_high``; GSPO's 4e-4.
        aggregation: How the token losses become one number; the paper's ``sequence-mean-token-sum``.
        log_ratio_clamp: See :func:`ppo_loss`.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`gspo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@loss_of_tokens(aggregation="sequence-mean-token-mean")
def gspo_token_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLosses:
    """GSPO-token: the value of the sequence ratio with the gradient of each token.

    ``s_t = sg(s) π(y_t) / sg(π(y_t))``, ``ℓ_t = -min(s_t A_t, clip(s_t, 1 - ε_low, 1 + ε_high) A_t)``.

    Zheng et al. (2025, arXiv:2507.18071, equations 13 and 14). Equal to :func:`gspo_loss` when the tokens of a sequence
    share one advantage; also valid when they do not.

    Args:
        clip_low: ``ε_low``; 3e-4 in section 5.1 of the paper.
        clip_high: ``ε_high``; 4e-4 there.
        log_ratio_clamp: Limit of each token's log-ratio in nats, before the mean; no limit when ``None``.
        logprobs, old_logprobs, advantages, mask, weights, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`gspo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_clip(clip_low, clip_high)
    ratio = tokens.ratio_of("sequence").detach() * torch.exp(tokens.logprobs - tokens.logprobs.detach())
    token_loss = clipped_surrogate(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high)
    return token_loss, clip_metrics(ratio, tokens, clip_low, clip_high)


@preset_of(ppo_loss, fixed={"ratio_level": "sequence-sum", **_ONE_CLIP}, aggregation="sequence-mean-token-mean")
def rloo_loss() -> None:
    """RLOO: PPO's clip on the ratio of the probabilities of whole sequences, one term per sequence.

    ``s = exp(clamp(Σ_t (log π(y_t) - log π_old(y_t)), ±20))``, ``mean_i -min(s_i A_i, clip(s_i) A_i)``.

    Ahmadian et al. (2024, arXiv:2402.14740), with the clip and the defaults of TRL and the advantages of
    :func:`rloo_advantages`; a KL penalty belongs in the reward. Beyond a log-ratio of ±20 nats a sequence has no
    gradient; the paper and TRL have no such clamp and overflow.

    Args:
        advantages: (B,) or (B, 1), detached here.
        log_ratio_clamp: Limit of each token's log-ratio in nats, before the sum; no limit when ``None``.
        weights: Factors; (B,) or (B, 1) is one factor for the term of each sequence. Detached here.
        aggregation: How the term of a sequence, which all its tokens share, is counted; once with the default.
        clip_low, clip_high: See :func:`ppo_loss`.
        logprobs, old_logprobs, mask, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`; ``policy/clip_fraction`` counts the tokens of clipped sequences,
        where TRL counts sequences.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@loss_of_tokens(aggregation="sequence-mean-token-mean")
def gmpo_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLosses:
    """Geometric-mean policy optimisation: the geometric mean of the clipped ratios of the tokens.

    ``c_t = clip(log ρ_t, -ε_low, ε_high)``; ``m_t = min(log ρ_t, c_t)`` where ``A > 0``, ``max`` where ``A < 0``;
    ``mean_i -A_i exp(mean_t m_t)``.

    Zhao et al. (2025, arXiv:2507.20673), whose clip is ``(e^-0.4, e^0.4)``.

    Args:
        advantages: (B,) or (B, 1), detached here; of (B, T) the mean over the sequence is taken, as in verl.
        clip_low: ``ε_low`` ≥ 0, nats.
        clip_high: ``ε_high`` ≥ 0, nats.
        log_ratio_clamp: Limit of each token's log-ratio in nats, before the mean; no limit when ``None``.
        aggregation: How the term of a sequence, which all its tokens share, is counted; once with the default.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output`; ``policy/clip_fraction`` (and ``_low``, ``_high``)
        counts the tokens whose gradient the clip removed.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not (clip_low >= 0.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low and clip_high are nats and must not be negative, got {clip_low} and {clip_high}")
    advantage = masked_mean(tokens.advantages, tokens.mask, -1).unsqueeze(-1)
    clipped = tokens.log_ratio.clamp(-clip_low, clip_high)
    pessimistic = torch.where(
        advantage > 0.0, torch.minimum(tokens.log_ratio, clipped), torch.maximum(tokens.log_ratio, clipped)
    )
    ratio = masked_mean(pessimistic, tokens.mask, -1).exp().unsqueeze(-1)
    moved = tokens.log_ratio.detach()
    low, high = (moved < -clip_low) & (advantage < 0.0), (moved > clip_high) & (advantage > 0.0)
    return (-advantage * ratio).expand_as(tokens.log_ratio), clip_fractions(low, high, tokens.mask)


def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """VESPO: REINFORCE weighted by a smooth kernel of the sequence's importance weight, without length normalisation.

    ``log w = clamp(Σ_t (log π(y_t) - log π_old(y_t)), log 1e-8, 20)``, ``φ = w^k exp(λ (1 - w))``,
    ``ℓ_t = -sg(φ) A_t log π(y_t)``, ``(k, λ)`` by the sign of the advantage; then :func:`aggregate`.

    Shen et al. (2026, arXiv:2602.10693). φ is 1 on-policy and largest, ``(k/λ)^k exp(λ - k)``, at ``w = k/λ``: with the
    defaults 1.21 at w = 2/3 where ``A ≥ 0``, 1.24 at w = 3/2 where ``A < 0``. Defaults and clamps are TRL's.

    Args:
        k_positive: ``k`` where ``A ≥ 0``.
        lambda_positive: ``λ`` where ``A ≥ 0``.
        k_negative: ``k`` where ``A < 0``.
        lambda_negative: ``λ`` where ``A < 0``.
        weights: (B, T), (B, 1) or (B,) importance weights, factors of ``w`` instead of the loss. A weight of 0 removes
            its tokens from the loss and does not change ``w``.
        logprobs, old_logprobs, advantages, mask, aggregation, denominator, max_length: See
            :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`policy_loss_output` and ``policy/vespo_weight``, the mean of φ over
        sequences.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not all(value >= 0.0 for value in (k_positive, lambda_positive, k_negative, lambda_negative)):
        raise ValueError(
            "k and lambda must not be negative, got "
            f"{(k_positive, lambda_positive)} where A >= 0 and {(k_negative, lambda_negative)} where A < 0"
        )
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask)
    log_weight = masked_sum(tokens.log_ratio.detach(), tokens.mask, -1).unsqueeze(-1)
    kept = None
    if weights is not None:
        spread = select(per_token(full_precision(weights.detach()), mask, "weights"), tokens.mask, 1.0)
        kept = spread != 0.0
        of_tokens = weights.shape == mask.shape and mask.shape[-1] != 1
        combine = masked_sum if of_tokens else masked_mean  # one factor per token, or the same one on all of them
        log_weight = log_weight + combine(select(spread, kept, 1.0).log(), tokens.mask, -1).unsqueeze(-1)
    log_weight = log_weight.clamp(_SMALLEST_LOG_WEIGHT, 20.0)
    positive = tokens.advantages >= 0.0
    kernel = torch.where(
        positive,
        torch.exp(lambda_positive + k_positive * log_weight - lambda_positive * log_weight.exp()),
        torch.exp(lambda_negative + k_negative * log_weight - lambda_negative * log_weight.exp()),
    )
    by_sequence = masked_mean(kernel, tokens.mask, -1)
    return policy_loss_output(
        -kernel * tokens.advantages * tokens.logprobs,
        tokens,
        weights=kept,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        metrics={"policy/vespo_weight": mean_metric(by_sequence, tokens.mask.any(-1))},
    )
