"""What all policy losses share: log-ratio → surrogate → weights → one number, with the metrics of the way.

A policy loss of one's own is three calls::

    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask)
    token_loss = -tokens.ratio * tokens.advantages                       # (B, T): the idea
    return policy_loss_output(token_loss, tokens, aggregation="token-mean", denominator=tokens_of_the_step)
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    masked_mean,
    masked_sum,
    select,
)
from rlhfkit.losses.metrics import max_metric

RatioLevel = Literal["token", "sequence", "sequence-sum"]
"""Whose probability ratio is taken, see :meth:`PolicyTokens.ratio_of`."""


class PolicyTokens(NamedTuple):
    """The inputs of a policy loss, checked and cleaned: masked entries hold 0 and cut the gradient.

    Attributes:
        logprobs: (B, T) under the policy, with gradient.
        log_ratio: (B, T) ``log π - log π_old``, clamped, with gradient.
        advantages: (B, T) detached.
        mask: (B, T) bool.
    """

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def ratio(self) -> Tensor:
        """(B, T) ``π / π_old`` of each token, with gradient; 1 where masked."""
        return self.log_ratio.exp()

    def ratio_of(self, level: RatioLevel, *, limit: float = 20.0) -> Tensor:
        """(B, T) ratio at a level, the same for all tokens of a sequence unless the level is ``token``.

        Args:
            level: ``token``: ``ρ_t``; ``sequence``: the geometric mean of ``ρ_t`` over the sequence, as in GSPO;
                ``sequence-sum``: their product, the ratio of the probabilities of the whole sequence.
            limit: Nats to which the log-ratio of a whole sequence is clamped.

        Raises:
            ValueError: If the level is unknown.
        """
        if level not in get_args(RatioLevel):
            raise ValueError(f"ratio_level must be one of {', '.join(get_args(RatioLevel))}, got {level!r}")
        if level == "token":
            return self.ratio
        reduce = masked_mean if level == "sequence" else masked_sum
        log_ratio = reduce(self.log_ratio, self.mask, -1).clamp(-limit, limit)
        return log_ratio.exp().unsqueeze(-1).expand_as(self.log_ratio)


def per_token(values: Tensor, like: Tensor, name: str) -> Tensor:
    """Spread one value per sequence over its tokens.

    Args:
        values: (B,), (B, 1) or (B, T).
        like: (B, T).
        name: For the error message.

    Returns:
        (B, T) view.

    Raises:
        ValueError: If the shape is none of the three.
    """
    batch, steps = like.shape
    if tuple(values.shape) not in {(batch,), (batch, 1), (batch, steps)}:
        raise ValueError(
            f"{name} must be one value per sequence ({batch},) or ({batch}, 1), or one per token ({batch}, {steps}), "
            f"got {tuple(values.shape)}"
        )
    return (values.unsqueeze(-1) if values.dim() == 1 else values).expand(batch, steps)


def policy_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    log_ratio_clamp: float | None = 20.0,
) -> PolicyTokens:
    """Check, cast up, mask and detach what every policy loss takes.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        old_logprobs: (B, T) under the policy the ratio is taken to; detached here.
        advantages: (B, T), (B, 1) or (B,); detached here.
        mask: (B, T), true where a token was chosen by the policy and counts.
        log_ratio_clamp: Limit in nats; the gradient is 0 beyond it.

    Raises:
        ValueError: If shapes do not fit or the clamp is not positive.
    """
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs must be (B, T), got {tuple(logprobs.shape)}")
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    if log_ratio_clamp is not None and not log_ratio_clamp > 0.0:
        raise ValueError(f"log_ratio_clamp must be positive or None, got {log_ratio_clamp}")
    mask = mask.bool()
    current = select(full_precision(logprobs), mask)
    log_ratio = current - select(full_precision(old_logprobs.detach()), mask)
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    spread = per_token(full_precision(advantages.detach()), logprobs, "advantages")
    return PolicyTokens(current, log_ratio, select(spread, mask), mask)


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None = None, delta: float | None = None) -> None:
    """Raise unless the clipping knobs make sense.

    Args:
        clip_low: In [0, 1].
        clip_high: At least 0.
        dual_clip: More than 1, or ``None``.
        delta: At least ``1 + clip_high``, or ``None``.

    Raises:
        ValueError: Otherwise.
    """
    if not 0.0 <= clip_low <= 1.0:
        raise ValueError(f"clip_low must lie in [0, 1] (the ratio is clipped at 1 - clip_low), got {clip_low}")
    if not clip_high >= 0.0:
        raise ValueError(f"clip_high must not be negative (the ratio is clipped at 1 + clip_high), got {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be larger than 1 (3 is usual) or None, got {dual_clip}")
    if delta is not None and not delta >= 1.0 + clip_high:
        raise ValueError(f"delta must be at least 1 + clip_high = {1.0 + clip_high}, or None; got {delta}")


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """PPO's pessimistic per-token loss; the formula is that of :func:`rlhfkit.losses.ppo_loss`.

    Args:
        ratio: (B, T) with gradient.
        advantages: (B, T).
        clip_low: ``ε_low``.
        clip_high: ``ε_high``.
        dual_clip: ``c``.
        delta: ``δ``.

    Returns:
        (B, T) to be minimised.
    """
    unclipped = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0.0, bounded, surrogate)
    return -surrogate


def clip_metrics(ratio: Tensor, tokens: PolicyTokens, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Share of tokens whose gradient the clip took away, in all and by side.

    Args:
        ratio: (B, T), the one that was clipped.
        tokens: The loss's inputs.
        clip_low: ``ε_low``.
        clip_high: ``ε_high``.
    """
    ratio = ratio.detach()
    low = masked_mean(((ratio < 1.0 - clip_low) & (tokens.advantages < 0.0)).float(), tokens.mask)
    high = masked_mean(((ratio > 1.0 + clip_high) & (tokens.advantages > 0.0)).float(), tokens.mask)
    return {
        "policy/clip_fraction": low + high,
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
    }


def policy_loss_output(
    token_loss: Tensor,
    tokens: PolicyTokens,
    *,
    weights: Tensor | None = None,
    aggregation: Aggregation,
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    metrics: Mapping[str, Tensor] | None = None,
) -> LossOutput:
    """Weigh and aggregate a per-token loss, and say how far the policy has moved.

    Args:
        token_loss: (B, T).
        tokens: The loss's inputs.
        weights: (B, T), (B, 1) or (B,) factors of each token's loss, detached here.
        aggregation: How tokens become one number, see :func:`rlhfkit.losses.aggregate`.
        denominator: Tokens (or sequences) of the whole optimizer step, see :func:`rlhfkit.losses.aggregate`.
        max_length: Only for ``aggregation="constant-length"``.
        metrics: More metrics to return.

    Returns:
        The loss with ``policy/approx_kl`` (k3), ``policy/ppo_kl`` (k1), ``policy/ratio_mean``, ``policy/ratio_max`` of
        the token ratio, and the given ones.
    """
    if weights is not None:
        spread = per_token(full_precision(weights.detach()), token_loss, "weights")
        token_loss = token_loss * select(spread, tokens.mask)
    loss = aggregate(token_loss, tokens.mask, aggregation, denominator, max_length=max_length)
    log_ratio = tokens.log_ratio.detach()
    ratio = log_ratio.exp()
    moved = {
        "policy/approx_kl": masked_mean(torch.expm1(log_ratio) - log_ratio, tokens.mask),
        "policy/ppo_kl": -masked_mean(log_ratio, tokens.mask),
        "policy/ratio_mean": masked_mean(ratio, tokens.mask),
        "policy/ratio_max": max_metric(ratio, tokens.mask),
    }
    return LossOutput(loss, {**moved, **(metrics or {})})
