"""The steps that all policy losses share: log-ratio, token losses, weights, aggregation, metrics.

A policy loss says what the loss of a token is; :func:`loss_of_tokens`, of this file, adds the rest::

    @loss_of_tokens(aggregation="token-mean")
    def unclipped_loss(tokens: PolicyTokens, *, scale: float = 1.0) -> TokenLosses:
        return -scale * tokens.ratio * tokens.advantages, {}             # (B, T): the idea, and metrics

One that reads more, such as the engine's log-probs, is a function with the whole signature, which calls
:func:`policy_tokens` and :func:`policy_loss_output`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

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

TokenLosses = tuple[Tensor, Mapping[str, Tensor]]
"""Losses of the tokens, (B, T), and metrics."""

RatioLevel = Literal["token", "sequence", "sequence-sum"]
"""Level at which the probability ratio is taken, see :meth:`PolicyTokens.ratio_of`."""


class PolicyTokens(NamedTuple):
    """The checked inputs of a policy loss; masked entries are 0 and have no gradient.

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

    def ratio_of(self, level: RatioLevel) -> Tensor:
        """(B, T) ratio at a level; the same for all tokens of a sequence unless the level is ``token``.

        The log-ratio of a sequence is limited to ±20 nats.

        Args:
            level: ``token``: ``ρ_t``; ``sequence``: its geometric mean over the sequence (GSPO); ``sequence-sum``: the
                product.

        Raises:
            ValueError: If the level is unknown.
        """
        if level not in get_args(RatioLevel):
            raise ValueError(f"ratio_level must be one of {', '.join(get_args(RatioLevel))}, got {level!r}")
        if level == "token":
            return self.ratio
        reduce = masked_mean if level == "sequence" else masked_sum
        log_ratio = reduce(self.log_ratio, self.mask, -1).clamp(-20.0, 20.0)
        return log_ratio.exp().unsqueeze(-1).expand_as(self.log_ratio)


def per_token(values: Tensor, like: Tensor, name: str) -> Tensor:
    """Expand (B,), (B, 1) or (B, T) values to a (B, T) view like ``like``; ``name`` is for the error message.

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
    """Check, cast to float32, mask and detach the inputs of a policy loss.

    Args:
        log_ratio_clamp: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask: See :mod:`rlhfkit.losses.policy`.

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
    """Raise ValueError if an argument of the clip is out of range."""
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
    """Token losses of PPO, (B, T), from (B, T) ratios and advantages; formula and names as in :func:`ppo_loss`."""
    unclipped = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    surrogate = torch.minimum(unclipped, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0.0, bounded, surrogate)
    return -surrogate


def clip_metrics(ratio: Tensor, tokens: PolicyTokens, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Shares of tokens whose gradient the clip of ``ratio`` (B, T) removes: in total and at either bound."""
    ratio = ratio.detach()
    low = (ratio < 1.0 - clip_low) & (tokens.advantages < 0.0)
    high = (ratio > 1.0 + clip_high) & (tokens.advantages > 0.0)
    return clip_fractions(low, high, tokens.mask)


def dual_clip_metrics(ratio: Tensor, tokens: PolicyTokens, dual_clip: float | None) -> dict[str, Tensor]:
    """``policy/dual_clip_fraction``: the share of tokens whose loss the dual clip bounds; empty without one."""
    if dual_clip is None:
        return {}
    bounded = (ratio.detach() > dual_clip) & (tokens.advantages < 0.0)
    return {"policy/dual_clip_fraction": masked_mean(bounded.float(), tokens.mask)}


def clip_fractions(low: Tensor, high: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """``policy/clip_fraction`` and its parts, from (B, T) bool tensors of the tokens clipped at either bound."""
    fraction_low, fraction_high = masked_mean(low.float(), mask), masked_mean(high.float(), mask)
    return {
        "policy/clip_fraction": fraction_low + fraction_high,
        "policy/clip_fraction_low": fraction_low,
        "policy/clip_fraction_high": fraction_high,
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
    """Weight and aggregate token losses, and measure how far the policy has moved from the old one.

    Args:
        token_loss: (B, T).
        tokens: The inputs of the loss.
        metrics: Further metrics to return.
        weights, aggregation, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with ``policy/approx_kl`` (k3), ``policy/ppo_kl`` (k1, verl's name), ``policy/ratio_mean`` and
        ``policy/ratio_max`` of the token ratio, the given metrics, and the losses and ratios of tokens.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
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
    return LossOutput(
        loss, {**moved, **(metrics or {})}, {"loss": select(token_loss.detach(), tokens.mask), "ratio": ratio}
    )


def loss_of_tokens(*, aggregation: Aggregation) -> Callable[[Callable[..., TokenLosses]], Callable[..., LossOutput]]:
    """Make a policy loss of a function that computes the losses of tokens from :class:`PolicyTokens`.

    The loss takes the arguments of :mod:`rlhfkit.losses.policy` and the keyword arguments of the function.

    Args:
        aggregation: The default of the loss.
    """

    def whole(of_tokens: Callable[..., TokenLosses]) -> Callable[..., LossOutput]:
        def loss(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            *,
            log_ratio_clamp: float | None = 20.0,
            weights: Tensor | None = None,
            aggregation: Aggregation = aggregation,
            denominator: Tensor | float | None = None,
            max_length: int | None = None,
            **own: Any,
        ) -> LossOutput:
            refuse_unknown(own)
            tokens = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
            token_loss, metrics = of_tokens(tokens, **own)
            return policy_loss_output(
                token_loss,
                tokens,
                weights=weights,
                aggregation=aggregation,
                denominator=denominator,
                max_length=max_length,
                metrics=metrics,
            )

        own = list(inspect.signature(of_tokens).parameters.values())[1:]
        *shared, _ = inspect.signature(loss).parameters.values()
        parameters = [*shared[:4], *own, *shared[4:]]
        refuse_unknown = _refusal(of_tokens, parameters)
        return _named_like(of_tokens, loss, parameters)

    return whole


def preset_of(
    loss: Callable[..., LossOutput], *, fixed: Mapping[str, Any] | None = None, **defaults: Any
) -> Callable[[Callable[[], None]], Callable[..., LossOutput]]:
    """Make a function without a body a published variant of a loss: the same with other defaults.

    Args:
        loss: The loss. It may be a preset itself.
        fixed: Arguments that the variant sets and does not take.
        **defaults: Its own defaults of others, by their names.

    Raises:
        TypeError: If the loss has no argument of such a name.
    """
    fixed = dict(fixed or {})
    parameters = inspect.signature(loss).parameters
    unknown = sorted({*fixed, *defaults} - {*parameters})
    if unknown:
        raise TypeError(f"{loss.__name__} has no {', '.join(unknown)}; it has {', '.join(parameters)}")
    taken = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in parameters.items()
        if name not in fixed
    ]

    def named(stub: Callable[[], None]) -> Callable[..., LossOutput]:
        refuse_unknown = _refusal(stub, taken)

        def variant(*tensors: Any, **given: Any) -> LossOutput:
            refuse_unknown(given)
            return loss(*tensors, **fixed, **{**defaults, **given})

        return _named_like(stub, variant, taken)

    return named


def _refusal(model: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[[Mapping[str, Any]], None]:
    """A check of a loss's keyword arguments, whose error names this loss and not the one that it is a variant of."""
    names = [parameter.name for parameter in parameters]

    def refuse_unknown(given: Mapping[str, Any]) -> None:
        unknown = [name for name in given if name not in names]
        if unknown:
            raise TypeError(f"{model.__name__} has no {', '.join(unknown)}; it has {', '.join(names)}")

    return refuse_unknown


def _named_like(
    model: Callable[..., Any], function: Callable[..., LossOutput], parameters: list[inspect.Parameter]
) -> Callable[..., LossOutput]:
    """Give a function the name and description of another, and a signature."""
    function.__name__, function.__qualname__ = model.__name__, model.__qualname__
    function.__module__, function.__doc__ = model.__module__, model.__doc__
    function.__signature__ = inspect.Signature(parameters, return_annotation=LossOutput)  # type: ignore[attr-defined]  # of any callable
    return function
