"""Binary classifier optimisation: answers that are labelled desirable or not, told apart by their implicit reward."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfkit.losses.aggregation import (
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    scalar_like,
    select,
)
from rlhfkit.losses.preference.kto import class_metrics


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
        ValueError: If shapes differ or an argument is out of range.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, desirable=desirable, weights=weights, mask=mask)
    if not beta > 0.0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not (desirable_weight >= 0.0 and undesirable_weight >= 0.0):
        raise ValueError(f"weights must not be negative, got {desirable_weight} and {undesirable_weight}")
    keep = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    wanted = desirable.bool()
    policy = select(full_precision(logprobs), keep)
    rewards = beta * (policy - select(full_precision(ref_logprobs.detach()), keep))
    delta = scalar_like(shift, rewards)
    weight = torch.where(wanted, scalar_like(desirable_weight, rewards), scalar_like(undesirable_weight, rewards))
    if weights is not None:
        weight = torch.where(wanted, weight, weight * select(full_precision(weights.detach()), keep))
    sign = torch.where(wanted, 1.0, -1.0).to(rewards.dtype)
    losses = -weight * F.logsigmoid(sign * (rewards - delta))
    metrics = class_metrics(rewards.detach(), policy.detach(), wanted & keep, ~wanted & keep)
    return LossOutput(aggregate(losses, keep, denominator=denominator), {**metrics, "reward_shift": delta})


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
