"""Entropy of the policy: a bonus in the loss, and training on the tokens of highest entropy only."""

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


def top_entropy_mask(
    entropy: Tensor, mask: Tensor, *, fraction: float = 0.2, threshold: Tensor | float | None = None
) -> Tensor:
    """Select the tokens at which the policy has the highest entropy.

    ``m_t and H_t ≥ quantile(H, 1 - fraction)``, which keeps ``⌊fraction (n - 1)⌋ + 1`` of n tokens.

    Wang et al. ("Beyond the 80/20 Rule", 2025, arXiv:2506.01939), with their 20 %. As the ``mask`` of a loss the result
    shrinks the local token count; as ``weights`` (``.float()``) it leaves all counts unchanged, as in TRL.

    Args:
        entropy: (B, T) entropy of the next-token distribution, nats; detached here.
        mask: (B, T), true where a token counts. Masked entries may hold anything.
        fraction: Share of the tokens to keep, in (0, 1].
        threshold: Nats, e.g. the quantile over all ranks; the quantile of this batch when ``None``.

    Returns:
        (B, T) bool. Ties with the threshold are kept, and so is the token of largest entropy.

    Raises:
        ValueError: If the shapes differ or ``fraction`` is out of range.
    """
    check_same_shape(entropy=entropy, mask=mask)
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must lie in (0, 1], got {fraction}")
    kept = select(full_precision(entropy.detach()), mask, fill=-torch.inf)
    if threshold is None:
        # Sorting, since torch.quantile refuses more than 16 million elements and cannot leave masked ones out. The
        # small number keeps a product such as 0.2 * 30, rounded down to 5.9999995, from losing a token.
        last = (mask.bool().sum() - 1).clamp(min=0)
        position = (fraction * last + 1e-4).floor().long()
        threshold = kept.flatten().sort(descending=True).values.gather(0, position.view(1))
    return mask.bool() & (kept >= threshold)


def entropy_bonus(
    entropy: Tensor,
    mask: Tensor,
    *,
    coef: float,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Entropy bonus, to be added to a policy loss with :func:`sum_losses`.

    ``-c aggregate(H_t)``

    Mnih et al. (2016, arXiv:1602.01783, section 4).

    Args:
        entropy: (B, T) of the next-token distribution at the sampling temperature, nats, with gradient
            (``linear_logprobs(..., entropy=True)``).
        mask: (B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN
            included.
        coef: ``c``; positive raises the entropy. With 0 the entropy is only measured.
        aggregation: The ``mode`` of :func:`aggregate`.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metric ``policy/entropy``, the mean of ``H_t``.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    bonus = aggregate(entropy, mask, aggregation, denominator, max_length=max_length)
    mean = masked_mean(full_precision(entropy.detach()), mask)
    return LossOutput(-coef * bonus if coef else bonus.detach() * 0.0, {"policy/entropy": mean})
