"""Kahneman–Tversky optimisation: preference learning from single answers that are labelled desirable or not.

KTO, Ethayarajh et al. (2024, arXiv:2402.01306). The reference point of the loss, an estimate of ``KL(π ‖ π_ref)`` from
answers to other prompts, takes two steps with a sum over ranks in between::

    sums = kto_kl_sums(mismatched, ref_mismatched)      # (2,): total and count, detached
    torch.distributed.all_reduce(sums)                  # where there are several ranks
    out = kto_loss(logprobs, ref_logprobs, desirable, kto_kl_estimate(sums))
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import (
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    masked_mean,
    masked_sum,
    scalar_like,
    select,
)

KTOLossType = Literal["kto", "apo_zero_unpaired"]
"""Losses of :func:`kto_loss`."""


def kto_kl_sums(mismatched: Tensor, ref_mismatched: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum and count of the log-ratios for :func:`kto_kl_estimate`, to be summed over ranks.

    ``[Σ_i (log π(y'_i|x_i) - log π_ref(y'_i|x_i)), number of i]``

    Args:
        mismatched: (B,) summed log-probs under the policy of answers to *other* prompts, commonly the batch's rotated
            by one (which degenerates with B = 1).
        ref_mismatched: (B,) the same under the reference model.
        mask: (B,) sequences that count; all of them when ``None``.

    Returns:
        (2,) detached.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(mismatched=mismatched, ref_mismatched=ref_mismatched, mask=mask)
    keep = torch.ones_like(mismatched, dtype=torch.bool) if mask is None else mask.bool()
    logratio = full_precision(mismatched.detach()) - full_precision(ref_mismatched.detach())
    return torch.stack([masked_sum(logratio, keep), keep.sum().to(logratio.dtype)])


def kto_kl_estimate(sums: Tensor) -> Tensor:
    """Reference point of KTO: the mean log-ratio of mismatched answers, not below 0.

    ``z = max(0, Σ_i (log π(y'_i|x_i) - log π_ref(y'_i|x_i)) / n)``

    KTO (arXiv:2402.01306, section 4.1). Clamped after the sum over ranks, as in OpenRLHF and TRL, which avoids a bias.

    Args:
        sums: (2,) from :func:`kto_kl_sums`, summed over ranks.

    Returns:
        Scalar without gradient, nats per sequence; 0 when the count is 0.

    Raises:
        ValueError: If ``sums`` is not (2,).
    """
    if sums.shape != (2,):
        raise ValueError(f"sums must be (2,), sum and count from kto_kl_sums, got {tuple(sums.shape)}")
    total, count = sums.detach().unbind()
    return (total / count.clamp(min=1)).clamp(min=0)


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: Tensor | float | None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: KTOLossType = "kto",
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Kahneman–Tversky optimisation on unpaired answers.

    ``ℓ = λ_D (1 - σ(β(Δ - z)))`` for desirable answers and ``λ_U (1 - σ(β(z - Δ)))`` for the others, with
    ``Δ = log π(y|x) - log π_ref(y|x)`` and the reference point ``z`` of :func:`kto_kl_estimate`.

    KTO, Ethayarajh et al. (2024, arXiv:2402.01306, equation 8). ``apo_zero_unpaired`` is the same with ``z = 0``:
    ``1 - σ(βΔ)`` and ``σ(βΔ)`` (D'Oosterlinck et al., 2024, arXiv:2408.06266). A NaN among the answers that count makes
    the loss NaN; TRL's nanmean hides it.

    Args:
        logprobs: (B,) summed log-probs of the answers under the policy.
        ref_logprobs: (B,) the same under the reference model; detached here.
        desirable: (B,) bool, true where the answer is wanted.
        kl: Scalar ``z``, detached here; ``None`` for ``apo_zero_unpaired``.
        beta: β > 0; 0.1 as in the paper and TRL (OpenRLHF: 0.01).
        desirable_weight: λ_D. The paper advises ``λ_D n_D / (λ_U n_U)`` in [1, 3/2] for ``n_D`` and ``n_U`` examples.
        undesirable_weight: λ_U.
        loss_type: ``kto`` or ``apo_zero_unpaired``.
        mask: (B,) answers that count, all when ``None``; the others may hold anything.
        denominator: Answers of the whole optimizer step divided by the number of micro-batches that are averaged. The
            answers of this call when ``None``.

    Returns:
        The loss with metrics ``rewards/chosen`` (``βΔ`` of desirable answers), ``rewards/rejected``,
        ``rewards/margins``, ``logps/chosen``, ``logps/rejected``, ``count/chosen``, ``count/rejected`` and, for
        ``kto``, ``kl``. An absent class has mean 0 and count 0: weight by the counts when averaging.

    Raises:
        ValueError: If shapes differ, an argument is out of range, or ``kl`` and ``loss_type`` do not fit.
    """
    if loss_type not in get_args(KTOLossType):
        raise ValueError(f"loss_type must be one of {', '.join(get_args(KTOLossType))}, got {loss_type!r}")
    if (kl is None) != (loss_type == "apo_zero_unpaired"):
        raise ValueError(f"kl is needed by 'kto' and has no meaning for 'apo_zero_unpaired', got {loss_type!r}, {kl=}")
    _check_arguments(logprobs, beta, desirable_weight, undesirable_weight)
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable, mask=mask)
    keep = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    wanted = desirable.bool()
    policy = select(full_precision(logprobs), keep)
    logratio = policy - select(full_precision(ref_logprobs.detach()), keep)
    anchor = scalar_like(0.0 if kl is None else kl, logratio)
    sign = torch.where(wanted, scalar_like(1.0, logratio), scalar_like(-1.0, logratio))
    weight = torch.where(wanted, scalar_like(desirable_weight, logratio), scalar_like(undesirable_weight, logratio))
    losses = weight * torch.sigmoid(-sign * beta * (logratio - anchor))  # 1 - σ(x) = σ(-x)
    metrics = class_metrics(beta * logratio.detach(), policy.detach(), wanted & keep, ~wanted & keep)
    if kl is not None:
        metrics["kl"] = anchor
    return LossOutput(aggregate(losses, keep, denominator=denominator), metrics)


def _check_arguments(logprobs: Tensor, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
    if logprobs.dim() != 1:
        raise ValueError(
            f"log-probs must be (B,), one sum per sequence, got {tuple(logprobs.shape)}; "
            "sequence_logprobs(token_logprobs, mask) makes it"
        )
    if not beta > 0.0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not (desirable_weight >= 0.0 and undesirable_weight >= 0.0):
        raise ValueError(f"weights must not be negative, got {desirable_weight} and {undesirable_weight}")


def class_metrics(rewards: Tensor, logprobs: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Means and counts of both classes, whose masks are ``chosen`` and ``rejected``; all (B,), detached."""
    chosen_reward, rejected_reward = masked_mean(rewards, chosen), masked_mean(rewards, rejected)
    return {
        "rewards/chosen": chosen_reward,
        "rewards/rejected": rejected_reward,
        "rewards/margins": chosen_reward - rejected_reward,
        "logps/chosen": masked_mean(logprobs, chosen),
        "logps/rejected": masked_mean(logprobs, rejected),
        "count/chosen": chosen.sum(),
        "count/rejected": rejected.sum(),
    }
