"""Losses of reward models: Bradley–Terry on pairs of answers, and process rewards on the steps of one answer."""

import torch
import torch.nn.functional as F
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
from rlhfkit.losses.metrics import max_metric, min_metric, sum_metric
from rlhfkit.losses.preference.dpo import smoothed_logsigmoid_loss


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float | None = None,
    centering: float = 0.0,
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Pairwise loss of a scalar reward model.

    ``ℓ = -(1-ε) log σ(r_c - r_r - m) - ε log σ(-(r_c - r_r - m)) + c (r_c + r_r)²``

    Bradley and Terry (1952) as in InstructGPT (Ouyang et al., 2022, arXiv:2203.02155, equation 1). Margin ``m``: Llama
    2 (Touvron et al., 2023, arXiv:2307.09288, equation 2). Centering ``c``, which keeps rewards near 0: Eisenstein et
    al. (2023, arXiv:2312.09244, section 2).

    Args:
        chosen: (B,) rewards of the chosen answers.
        rejected: (B,) rewards of the rejected answers.
        margin: (B,) or scalar, subtracted from the difference; none by default.
        centering: ``c`` ≥ 0; off by default, TRL suggests 0.01.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.
        mask: (B,) pairs that count; others may hold anything.
        denominator: Pairs of the whole optimizer step divided by the number of micro-batches averaged; the local count
            when ``None``.

    Returns:
        The loss with metrics ``rewards/chosen``, ``rewards/rejected``, ``rewards/accuracies`` (without the margin; ties
        are wrong), ``rewards/margins``, ``rewards/mean``, ``rewards/min`` and ``rewards/max`` (over both answers). All
        are 0 where no pair counts.

    Raises:
        ValueError: If shapes differ or an argument is out of range.
    """
    check_same_shape(chosen=chosen, rejected=rejected, mask=mask)
    if chosen.dim() != 1:
        raise ValueError(f"rewards must be (B,), one per answer, got {tuple(chosen.shape)}; squeeze (B, 1)")
    if not centering >= 0.0:
        raise ValueError(f"centering must not be negative, got {centering}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    keep = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask.bool()
    chosen, rejected = select(full_precision(chosen), keep), select(full_precision(rejected), keep)
    difference = chosen - rejected
    logits = difference - _margin(margin, difference, keep)
    losses = smoothed_logsigmoid_loss(logits, label_smoothing)
    if centering:
        losses = losses + centering * (chosen + rejected).square()
    return LossOutput(aggregate(losses, keep, denominator=denominator), _pair_metrics(chosen, rejected, keep))


def process_reward_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    *,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Loss of a process reward model: classify every reasoning step, with hard or soft labels.

    ``ℓ = -log p(label)`` for hard labels, ``ℓ = -y log p_0 - (1-y) log p_1`` for soft ones, then :func:`aggregate` over
    the steps.

    Let's Verify Step by Step, Lightman et al. (2023, arXiv:2305.20050), hard labels; Math-Shepherd, Wang et al. (2023,
    arXiv:2312.08935, equation 4), soft labels: the probability that a step leads to a right answer. Labels are on the
    axis of the logits: for a step read at a placeholder token (OpenRLHF), select that position, not the one before it.

    Args:
        logits: (B, T, K) over K classes, or (B, T) for a head with one output (the logit of a good step). Of a language
            model that answers with tokens such as ``+`` and ``-``, best only their columns: ``logits[..., [plus,
            minus]]``.
        labels: (B, T). Integers: classes in [0, K), or 0 and 1 for (B, T) logits. Floats: the probability of class 0 of
            K = 2, or of a good step for (B, T) logits. Masked entries may hold anything (-100, NaN).
        mask: (B, T), true at positions where a step is judged.
        aggregation: How the steps become one number; the mean over all steps by default, as in OpenRLHF.
        denominator: Steps (or answers) of the whole optimizer step, divided by the number of micro-batches that are
            averaged; the steps of this call when ``None``.
        max_length: See :func:`aggregate`.

    Returns:
        The loss with metrics ``prm/accuracy`` (share of steps whose likelier class is the label; soft labels count as
        their likelier class) and ``prm/steps``.

    Raises:
        ValueError: If shapes do not fit, or soft labels meet more than two classes.
    """
    check_same_shape(labels=labels, mask=mask)
    soft = labels.is_floating_point()
    if logits.shape[:2] != labels.shape or logits.dim() not in (2, 3):
        raise ValueError(
            f"logits must be (B, T) or (B, T, K) with labels (B, T) = {tuple(labels.shape)}, got {tuple(logits.shape)}"
        )
    if soft and logits.dim() == 3 and logits.shape[-1] != 2:
        raise ValueError(f"soft labels are probabilities of class 0 of 2, got logits for {logits.shape[-1]} classes")
    keep = mask.bool()
    labels = select(labels, keep)
    if logits.dim() == 2:
        logits = select(full_precision(logits), keep)
        losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
        correct = (logits.detach() > 0) == (labels > 0.5)
    else:
        logprobs = select(full_precision(logits), keep.unsqueeze(-1)).log_softmax(-1)
        if soft:
            good = labels.to(logprobs.dtype)
            losses = -good * logprobs[..., 0] - (1.0 - good) * logprobs[..., 1]
            correct = (logprobs[..., 0] > logprobs[..., 1]) == (labels > 0.5)
        else:
            losses = -logprobs.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
            correct = logprobs.argmax(-1) == labels
    metrics = {"prm/accuracy": masked_mean(correct.float(), keep), "prm/steps": sum_metric(keep.float(), keep)}
    return LossOutput(aggregate(losses, keep, aggregation, denominator, max_length=max_length), metrics)


def _margin(margin: Tensor | float | None, difference: Tensor, keep: Tensor) -> Tensor | float:
    if not isinstance(margin, Tensor):
        return 0.0 if margin is None else margin
    if margin.dim() == 0:
        return margin.to(difference.dtype)
    check_same_shape(margin=margin, chosen=difference)
    return select(margin.to(difference.dtype), keep)


def _pair_metrics(chosen: Tensor, rejected: Tensor, keep: Tensor) -> dict[str, Tensor]:
    chosen, rejected = chosen.detach(), rejected.detach()
    both, counted = torch.cat([chosen, rejected]), torch.cat([keep, keep])
    return {
        "rewards/chosen": masked_mean(chosen, keep),
        "rewards/rejected": masked_mean(rejected, keep),
        "rewards/accuracies": masked_mean((chosen > rejected).float(), keep),
        "rewards/margins": masked_mean(chosen - rejected, keep),
        "rewards/mean": masked_mean(both, counted),
        "rewards/min": min_metric(both, counted),
        "rewards/max": max_metric(both, counted),
    }
