"""Preference learning from single answers that are labelled desirable or not: KTO and BCO.

KTO, Ethayarajh et al. (2024, arXiv:2402.01306). The reference point of the loss, an estimate of ``KL(π ‖ π_ref)`` from
answers to other prompts, takes two steps with a sum over ranks in between::

    sums = kto_kl_sums(mismatched, ref_mismatched)      # (2,): total and count, detached
    torch.distributed.all_reduce(sums)                  # where there are several ranks
    out = kto_loss(logprobs, ref_logprobs, desirable, kto_kl_estimate(sums))
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
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
        TypeError: If ``desirable`` holds anything but booleans.
        ValueError: If shapes differ, an argument is out of range, or ``kl`` and ``loss_type`` do not fit.
    """
    if loss_type not in get_args(KTOLossType):
        raise ValueError(f"loss_type must be one of {', '.join(get_args(KTOLossType))}, got {loss_type!r}")
    if (kl is None) != (loss_type == "apo_zero_unpaired"):
        raise ValueError(f"kl is needed by 'kto' and has no meaning for 'apo_zero_unpaired', got {loss_type!r}, {kl=}")
    answers = _Answers(logprobs, ref_logprobs, desirable, beta, desirable_weight, undesirable_weight, mask)
    anchor = answers.scalar("kl", 0.0 if kl is None else kl)
    # 1 - σ(x) = σ(-x)
    losses = answers.weight * torch.sigmoid(-answers.sign * beta * (answers.logratio - anchor))
    metrics = answers.metrics(beta * answers.logratio)
    if kl is not None:
        metrics["kl"] = anchor
    return LossOutput(aggregate(losses, answers.keep, denominator=denominator), metrics)


def bco_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    shift: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Binary classifier optimisation on unpaired answers.

    ``ℓ = -λ_D log σ(βΔ - δ)`` for desirable answers and ``-λ_U w log σ(-(βΔ - δ))`` for the others, with
    ``Δ = log π(y|x) - log π_ref(y|x)`` and the reward shift ``δ = (E_D[βΔ] + E_U[βΔ]) / 2``.

    BCO, Jung et al. (2024, arXiv:2404.04656). ``w = p(desirable|x) / p(undesirable|x)`` matches the prompts of both
    classes where they differ, see :func:`density_ratio_weights`. The pair loss ``bco_pair`` of :func:`dpo_loss` is the
    same on pairs with δ = 0.

    Args:
        logprobs: (B,) summed log-probs of the answers under the policy.
        ref_logprobs: (B,) the same under the reference model; detached here.
        desirable: (B,) bool, true where the answer is wanted.
        shift: Scalar δ, detached here.
        beta: β > 0; 0.1 as in TRL.
        desirable_weight: λ_D (TRL's ``desirable_weight``).
        undesirable_weight: λ_U.
        weights: (B,) w of the undesirable answers, detached here; 1 when ``None``.
        mask: (B,) answers that count, all when ``None``; the others may hold anything.
        denominator: Answers of the whole optimizer step divided by the number of micro-batches that are averaged. The
            answers of this call when ``None``. (The paper averages each class by itself, this function and TRL
            all answers together; ``desirable_weight`` balances classes.)

    Returns:
        The loss with the metrics of :func:`kto_loss` (``rewards/chosen`` is the mean ``βΔ`` of desirable answers), and
        ``reward_shift``.

    Raises:
        TypeError: If ``desirable`` holds anything but booleans.
        ValueError: If shapes differ or an argument is out of range.
    """
    answers = _Answers(logprobs, ref_logprobs, desirable, beta, desirable_weight, undesirable_weight, mask)
    check_same_shape(logprobs=logprobs, weights=weights)
    rewards, weight = beta * answers.logratio, answers.weight
    delta = answers.scalar("shift", shift)
    if weights is not None:
        weight = torch.where(answers.wanted, weight, weight * select(full_precision(weights.detach()), answers.keep))
    losses = -weight * F.logsigmoid(answers.sign * (rewards - delta))
    loss = aggregate(losses, answers.keep, denominator=denominator)
    return LossOutput(loss, {**answers.metrics(rewards), "reward_shift": delta})


class _Answers:
    """Checked and masked inputs of the losses above."""

    def __init__(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        desirable: Tensor,
        beta: float,
        desirable_weight: float,
        undesirable_weight: float,
        mask: Tensor | None,
    ) -> None:
        if logprobs.dim() != 1:
            raise ValueError(
                f"log-probs must be (B,), one sum per sequence, got {tuple(logprobs.shape)}; "
                "sequence_logprobs(token_logprobs, mask) makes it"
            )
        if not beta > 0.0:
            raise ValueError(f"beta must be positive, got {beta}")
        if not (desirable_weight >= 0.0 and undesirable_weight >= 0.0):
            raise ValueError(f"weights must not be negative, got {desirable_weight} and {undesirable_weight}")
        check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable, mask=mask)
        if desirable.dtype != torch.bool:
            raise TypeError(f"desirable must be a bool tensor, got {desirable.dtype}: labels == 1 makes one")
        self.keep = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
        self.wanted = desirable
        self.policy = select(full_precision(logprobs), self.keep)
        self.logratio = self.policy - select(full_precision(ref_logprobs.detach()), self.keep)
        one, good, bad = (scalar_like(value, self.logratio) for value in (1.0, desirable_weight, undesirable_weight))
        self.sign = torch.where(self.wanted, one, -one)
        self.weight = torch.where(self.wanted, good, bad)

    def scalar(self, name: str, value: Tensor | float) -> Tensor:
        """A number that all answers share, detached; raises ValueError for one of each answer."""
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} must be one number for all answers, got {tuple(value.shape)}")
        return scalar_like(value, self.logratio)

    def metrics(self, rewards: Tensor) -> dict[str, Tensor]:
        """Means and counts of both classes, from rewards (B,)."""
        rewards, logprobs = rewards.detach(), self.policy.detach()
        chosen, rejected = self.wanted & self.keep, ~self.wanted & self.keep
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


def density_ratio_weights(
    embeddings: Tensor,
    desirable: Tensor,
    *,
    smallest: float = 0.5,
    largest: float = 10.0,
    l2: float = 1.0,
    steps: int = 100,
) -> Tensor:
    """Weights of BCO that match the prompts of undesirable answers to those of desirable ones.

    ``w_i = p(desirable|x_i) / (1 - p(desirable|x_i))``, clamped, by the logistic regression
    ``p(desirable|x) = σ(a·x + b)`` on embeddings of the prompts, which minimises
    ``Σ_i -N / (2 N_label_i) log p(label_i|x_i) + (l2 / 2) |a|²``.

    Underlying distribution matching, Jung et al. (2024, arXiv:2404.04656); clamp and regression are TRL's
    (``min_density_ratio``, ``max_density_ratio``, scikit-learn's ``LogisticRegression(class_weight="balanced")``). Both
    classes count the same, whatever their sizes, so that w is the ratio of the densities of prompts: 1 where these
    are equal.

    Args:
        embeddings: (N, E) of the prompts.
        desirable: (N,) bool.
        smallest: Smallest weight.
        largest: Largest weight.
        l2: Strength of the regularisation, 1 / C of scikit-learn.
        steps: Iterations of L-BFGS.

    Returns:
        (N,) float32, 1 for desirable answers.

    Raises:
        ValueError: If the shapes do not fit, a number is out of range, or there is one class only.
    """
    if embeddings.dim() != 2 or desirable.shape != embeddings.shape[:1]:
        raise ValueError(
            f"embeddings must be (N, E) and desirable (N,), got {tuple(embeddings.shape)} and {tuple(desirable.shape)}"
        )
    if not 0.0 < smallest <= largest or not l2 >= 0.0:
        raise ValueError(f"need 0 < smallest <= largest and l2 >= 0, got {smallest}, {largest} and {l2}")
    labels = desirable.bool()
    if bool(labels.all()) or not bool(labels.any()):
        raise ValueError("a density ratio needs desirable and undesirable answers, got one class only")
    inputs, targets = embeddings.detach().double(), labels.double()
    wanted = targets.mean()
    balance = 0.5 / torch.where(labels, wanted, 1.0 - wanted)
    slope = torch.zeros(inputs.shape[1], dtype=torch.float64, device=inputs.device, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([slope, offset], max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss() -> Tensor:
        optimizer.zero_grad()
        misfit = F.binary_cross_entropy_with_logits(inputs @ slope + offset, targets, balance, reduction="sum")
        total: Tensor = misfit + 0.5 * l2 * slope.square().sum()
        torch.autograd.backward(total)
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]  # torch's annotations lack it
    ratio = (inputs @ slope + offset).detach().exp().clamp(smallest, largest)
    return torch.where(labels, 1.0, ratio).float()
