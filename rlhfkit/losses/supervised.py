"""Supervised losses on token log-probs: cross-entropy, and dynamic fine-tuning (DFT).

They take the log-prob of each label, (B, T) on the next-token axis, from :func:`rlhfkit.losses.linear_logprobs`.
"""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    select,
)
from rlhfkit.losses.metrics import exp_mean_metric, mean_metric


def cross_entropy_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Token cross-entropy (negative log-likelihood of the labels), the loss of supervised fine-tuning.

    ``l_t = -log p(y_t)``, then :func:`aggregate`.

    Bengio et al. (2003), "A Neural Probabilistic Language Model"; the loss of TRL, OpenRLHF and Transformers.

    Args:
        logprobs: (B, T) log-probs of the labels, ``logprobs[:, t]`` belongs to token ``t + 1``. Masked entries may hold
            anything, NaN included.
        mask: (B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN
            included.
        aggregation: How the token losses become one number; ``token-mean`` as in TRL, OpenRLHF and Transformers.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metrics ``sft/nll`` (nats per trained token) and ``sft/perplexity`` (its exponential).

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    negative = -select(full_precision(logprobs), mask)
    loss = aggregate(negative, mask, aggregation, denominator, max_length=max_length)
    return LossOutput(loss, _metrics(negative, mask))


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
        mask: (B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN
            included.
        aggregation: How the token losses become one number; ``token-mean`` as in the paper's code and TRL.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metrics ``sft/nll`` and ``sft/perplexity`` of the unweighted cross-entropy.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    negative = -select(full_precision(logprobs), mask)
    probability = torch.exp(-negative.detach())
    token_loss = probability * select(negative, probability > 0)  # p log p → 0 where log p = -inf
    loss = aggregate(token_loss, mask, aggregation, denominator, max_length=max_length)
    return LossOutput(loss, _metrics(negative, mask))


def _metrics(negative: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"sft/nll": mean_metric(negative, mask), "sft/perplexity": exp_mean_metric(negative, mask)}
