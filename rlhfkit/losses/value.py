"""Loss of the critic: clipped regression of values on returns."""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    masked_mean,
    masked_moments,
    select,
)
from rlhfkit.losses.metrics import sums_metric


def value_loss(
    values: Tensor,
    old_values: Tensor | None,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.5,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Clipped value regression of PPO.

    ``ℓ_t = ½ max((V_t - R_t)², (V_old,t + clip(V_t - V_old,t, ±ε) - R_t)²)``, then :func:`aggregate`.

    Schulman et al. (2016, arXiv:1506.02438) regress without a clip; the clip is that of the PPO code and InstructGPT.

    Args:
        values: (B, T) the critic's, with gradient. ``values[:, t]`` is the state in which token t+1 is chosen.
        old_values: (B, T) the critic's before the iteration, detached here; ``None`` in its first update (no clip).
        returns: (B, T) targets, detached here.
        mask: (B, T), true where the policy chose the token. Masked entries may hold anything.
        clip: ``ε`` > 0 in units of the return, 0.5 in OpenRLHF and verl, 0.2 in TRL; ``None``: plain regression.
        aggregation: The ``mode`` of :func:`aggregate`.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metrics ``value/clip_fraction`` (tokens whose clipped error is the larger), ``value/mean``,
        ``value/error`` (mean of ``(V - R)²``) and ``value/explained_variance`` (``1 - Var(R - V) / Var(R)``; 0 where
        the returns do not vary).

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be positive or None, got {clip}")
    current, target = select(full_precision(values), mask), select(full_precision(returns.detach()), mask)
    plain = error = (current - target).square()
    outside = torch.zeros_like(mask, dtype=torch.bool)
    if clip is not None and old_values is not None:
        old = select(full_precision(old_values.detach()), mask)
        change = current - old
        clipped = (old + change.clamp(-clip, clip) - target).square()
        error = torch.maximum(plain, clipped)
        outside = change.abs() > clip  # inside, old + change differs from current by rounding
    with torch.no_grad():
        residual = target - current
        _, total, squares = masked_moments(residual, mask)
        metrics = {
            "value/clip_fraction": masked_mean(((error > plain) & outside).float(), mask),
            "value/mean": masked_mean(current, mask),
            "value/error": masked_mean(plain, mask),
            "value/explained_variance": sums_metric(_explained_variance, *masked_moments(target, mask), total, squares),
        }
    return LossOutput(0.5 * aggregate(error, mask, aggregation, denominator, max_length=max_length), metrics)


def _explained_variance(state: Tensor) -> Tensor:
    """From the count, and sums and sums of squares of targets and of residuals."""
    count, target, target_squares, residual, residual_squares = state
    count = count.clamp(min=1)
    spread = target_squares / count - (target / count).square()
    unexplained = residual_squares / count - (residual / count).square()
    # Less than rounding leaves of targets that are all equal.
    varies = spread > 4 * torch.finfo(spread.dtype).eps * target_squares / count
    return torch.where(varies, 1.0 - unexplained / torch.where(varies, spread, 1.0), 0.0)
