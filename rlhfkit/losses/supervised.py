"""Supervised losses on token log-probs: cross-entropy with label smoothing and z-loss, and dynamic fine-tuning (DFT).

They take the log-prob of each label, (B, T) on the next-token axis, from :func:`rlhfkit.losses.linear_logprobs`;
smoothing and z-loss take one more (B, T) tensor each.
"""

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
from rlhfkit.losses.arguments import AGGREGATION_ARGUMENTS, share_arguments
from rlhfkit.losses.metrics import exp_mean_metric, mean_metric


@share_arguments(AGGREGATION_ARGUMENTS)
def cross_entropy_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    label_smoothing: float = 0.0,
    mean_logprobs: Tensor | None = None,
    z_loss_coef: float = 0.0,
    log_normalizer: Tensor | None = None,
) -> LossOutput:
    """Token cross-entropy (negative log-likelihood of the labels), the loss of supervised fine-tuning.

    ``l_t = -(1 - ε) log p(y_t) - ε mean_v log p(v) + ζ (log Z_t)²``, then :func:`aggregate`.

    ``ε``: label smoothing, Szegedy et al. (2015, arXiv:1512.00567), uniform over all V tokens as in
    :func:`torch.nn.functional.cross_entropy`. ``ζ``: z-loss of PaLM (Chowdhery et al., 2022, arXiv:2204.02311, section
    5), which keeps ``log Z = logsumexp(logits)`` near 0.

    Args:
        logprobs: (B, T) log-probs of the labels, ``logprobs[:, t]`` belongs to token ``t + 1``. Masked entries may hold
            anything, NaN included.
        aggregation: How the token losses become one number; ``token-mean`` as in TRL, OpenRLHF and Transformers.
        label_smoothing: ε in [0, 1). Needs ``mean_logprobs``.
        mean_logprobs: (B, T) mean over the vocabulary of the log-probs, ``log_softmax(logits).mean(-1)``.
        z_loss_coef: ζ ≥ 0; PaLM uses 1e-4. Needs ``log_normalizer``.
        log_normalizer: (B, T) ``logsumexp(logits, -1)``.

    Returns:
        The loss with metrics ``sft/nll`` (nats per trained token), ``sft/perplexity`` (its exponential) and, when asked
        for, ``sft/z_loss`` (before ζ).
    """
    check_same_shape(logprobs=logprobs, mask=mask, mean_logprobs=mean_logprobs, log_normalizer=log_normalizer)
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing}")
    if not z_loss_coef >= 0.0:
        raise ValueError(f"z_loss_coef must not be negative, got {z_loss_coef}")
    if (label_smoothing > 0.0) != (mean_logprobs is not None):
        raise ValueError("label_smoothing > 0 and mean_logprobs belong together: give both or neither")
    if (z_loss_coef > 0.0) != (log_normalizer is not None):
        raise ValueError("z_loss_coef > 0 and log_normalizer belong together: give both or neither")
    negative = -select(full_precision(logprobs), mask)
    token_loss = negative
    metrics = _metrics(negative, mask)
    if mean_logprobs is not None:
        token_loss = (1.0 - label_smoothing) * negative - label_smoothing * select(full_precision(mean_logprobs), mask)
    if log_normalizer is not None:
        z_loss = select(full_precision(log_normalizer), mask).square()
        token_loss = token_loss + z_loss_coef * z_loss
        metrics["sft/z_loss"] = masked_mean(z_loss.detach(), mask)
    return LossOutput(aggregate(token_loss, mask, aggregation, denominator, max_length=max_length), metrics)


@share_arguments(AGGREGATION_ARGUMENTS)
def dft_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Dynamic fine-tuning: cross-entropy in which every token is weighted by its own detached probability.

    ``l_t = -sg(p(y_t)) log p(y_t)``, then :func:`aggregate`; ``sg`` stops the gradient.

    Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification" (2025,
    arXiv:2508.05629). The weight cancels the ``1 / p`` in the gradient of unlikely labels.

    Args:
        logprobs: (B, T) log-probs of the labels on the next-token axis.
        aggregation: How the token losses become one number; ``token-mean`` as in the paper's code and TRL.

    Returns:
        The loss with metrics ``sft/nll`` and ``sft/perplexity`` of the unweighted cross-entropy.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    negative = -select(full_precision(logprobs), mask)
    probability = torch.exp(-negative.detach())
    token_loss = probability * select(negative, probability > 0)  # p log p → 0 where log p = -inf
    loss = aggregate(token_loss, mask, aggregation, denominator, max_length=max_length)
    return LossOutput(loss, _metrics(negative, mask))


def _metrics(negative: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"sft/nll": mean_metric(negative, mask), "sft/perplexity": exp_mean_metric(negative, mask)}
