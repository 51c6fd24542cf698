"""Preference losses without a reference model: SimPO with AlphaPO, CPO and ORPO.

All take summed log-probs (B,) and completion lengths, and divide inside where the paper does. What they have in common:

- ``chosen``, ``rejected``: (B,) summed log-probs of the chosen and of the rejected answers under the policy, see
  :func:`~rlhfkit.losses.sequence_logprobs`.
- ``chosen_lengths``, ``rejected_lengths``: (B,) completion tokens of these answers, at least 1.
- ``mean_chosen_length``: mean tokens of a chosen answer over the whole optimizer step, for the likelihood term. That of
  the call when ``None``, which is refused with a ``denominator``.
- ``mask``: (B,) pairs that count, all when ``None``; the other rows may hold anything.
- ``denominator``: pairs of the whole optimizer step, divided by the number of micro-batches that are averaged. The
  pairs of the call when ``None``.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfkit.losses.aggregation import LossOutput, aggregate, check_same_shape, full_precision, masked_mean, select
from rlhfkit.losses.preference.dpo import preference_metrics, smoothed_logsigmoid_loss

_LARGEST_EXPONENT = 80.0  # as in the KL estimates: e^80 is finite in float32, with room for a product

CPOLossType = Literal["sigmoid", "hinge", "ipo"]
"""Contrastive terms of :func:`cpo_loss`."""


def simpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    nll_coef: float = 0.0,
    mean_chosen_length: Tensor | float | None = None,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """SimPO: DPO with the length-averaged log-prob as reward, no reference model and a target margin.

    ``ℓ = -log σ(β (log π_c / n_c - log π_r / n_r) - γ)``, smoothed with ε like ``sigmoid`` of the DPO family.

    SimPO, Meng et al. (2024, arXiv:2405.14734, equation 6). With ``nll_coef > 0`` it is CPO-SimPO. With ``alpha`` it is
    AlphaPO, Gupta et al. (2025, arXiv:2501.03884), whose reward is curved: ``β r(p)`` in place of ``β log p``, with
    ``p = exp(log π / n)`` and ``r(p) = (1 - p^-α) / α``. ``p^-α`` is at most e^80, which float32 can hold: an answer
    beyond that, at 320 nats per token with α = 0.25, has no gradient.

    Args:
        beta: β > 0; the paper uses 2.0 to 2.5, its authors report up to 10. (TRL's class default 0.1 is DPO's.)
        gamma: γ ≥ 0, 0.3 to 1.6 in the paper; TRL's ``simpo_gamma``, the authors' ``gamma_beta_ratio`` times ``beta``.
        alpha: α, any sign; 0 is SimPO. No published default: AlphaPO's paper tunes it per model around 0.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.
        nll_coef: Weight of the negative log-likelihood of the chosen answers, averaged over their tokens.
        chosen, rejected, chosen_lengths, rejected_lengths, mean_chosen_length, mask, denominator: See
            :mod:`rlhfkit.losses.preference.reference_free`.

    Returns:
        The loss with metrics ``rewards/*`` (``β log π / n`` or ``β r``), ``logps/*`` (sums), ``nll_loss`` with
        ``nll_coef``.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if not gamma >= 0.0:
        raise ValueError(f"gamma must not be negative, got {gamma}")
    pairs = _Pairs(chosen, rejected, chosen_lengths, rejected_lengths, mask, beta, label_smoothing)
    chosen_reward = beta * _alpha_reward(pairs.mean_chosen, alpha)
    rejected_reward = beta * _alpha_reward(pairs.mean_rejected, alpha)
    losses = smoothed_logsigmoid_loss(chosen_reward - rejected_reward - gamma, label_smoothing)
    return pairs.output(losses, chosen_reward, rejected_reward, nll_coef, mean_chosen_length, denominator)


def cpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
    loss_type: CPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    nll_coef: float = 1.0,
    mean_chosen_length: Tensor | float | None = None,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Contrastive preference optimisation: DPO against a uniform reference, plus cross-entropy on the chosen answer.

    ``ℓ = -log σ(β (log π_c - log π_r)) - λ log π_c / mean(n_c)``

    CPO, Xu et al. (2024, arXiv:2401.08417). ``hinge`` is ``max(0, 1 - β (log π_c - log π_r))``, ``ipo`` is
    ``(log π_c / n_c - log π_r / n_r - 1/(2β))²``. The likelihood term is a mean over tokens, as in the authors' code
    and TRL.

    Args:
        beta: β > 0; 0.1 as in the paper and TRL.
        loss_type: Contrastive term: ``sigmoid`` (the paper's), ``hinge`` or ``ipo``.
        label_smoothing: ε in [0, 0.5) for ``sigmoid``.
        nll_coef: λ; 1 as in the paper (TRL's ``cpo_alpha``).
        chosen, rejected, chosen_lengths, rejected_lengths, mean_chosen_length, mask, denominator: See
            :mod:`rlhfkit.losses.preference.reference_free`.

    Returns:
        The loss with metrics ``rewards/*`` (``β log π``), ``logps/*`` and ``nll_loss``.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    if loss_type not in get_args(CPOLossType):
        raise ValueError(f"loss_type must be one of {', '.join(get_args(CPOLossType))}, got {loss_type!r}")
    if label_smoothing > 0.0 and loss_type != "sigmoid":
        raise ValueError(f"label_smoothing has no effect on loss_type {loss_type!r}, got {label_smoothing}")
    pairs = _Pairs(chosen, rejected, chosen_lengths, rejected_lengths, mask, beta, label_smoothing)
    if loss_type == "sigmoid":
        losses = smoothed_logsigmoid_loss(beta * (pairs.chosen - pairs.rejected), label_smoothing)
    elif loss_type == "hinge":
        losses = torch.relu(1.0 - beta * (pairs.chosen - pairs.rejected))
    else:
        losses = (pairs.mean_chosen - pairs.mean_rejected - 1.0 / (2.0 * beta)).square()
    return pairs.output(losses, beta * pairs.chosen, beta * pairs.rejected, nll_coef, mean_chosen_length, denominator)


def orpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float = 0.1,
    mean_chosen_length: Tensor | float | None = None,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Odds-ratio preference optimisation: cross-entropy on the chosen answer and a penalty on its odds ratio.

    ``ℓ = -log π_c / mean(n_c) - β log σ(log(odds_c / odds_r))`` with ``odds = p / (1 - p)``, ``p = exp(log π / n)``.

    ORPO, Hong et al. (2024, arXiv:2403.07691, equations 6 and 7). ``p`` is kept one float step below 1, where the odds
    are infinite and the gradient of TRL's code is NaN. A float64 input stays float64, unlike in TRL.

    Args:
        beta: Weight of the odds-ratio term, the paper's λ; 0.1 as in the paper and TRL.
        chosen, rejected, chosen_lengths, rejected_lengths, mean_chosen_length, mask, denominator: See
            :mod:`rlhfkit.losses.preference.reference_free`.

    Returns:
        The loss with metrics ``rewards/*`` (``β log π / n``), ``logps/*`` (sums), ``nll_loss`` and ``log_odds_chosen``.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    pairs = _Pairs(chosen, rejected, chosen_lengths, rejected_lengths, mask, beta, 0.0)
    log_odds = _log_odds(pairs.mean_chosen) - _log_odds(pairs.mean_rejected)
    losses = -beta * F.logsigmoid(log_odds)
    output = pairs.output(
        losses, beta * pairs.mean_chosen, beta * pairs.mean_rejected, 1.0, mean_chosen_length, denominator
    )
    return LossOutput(output.loss, {**output.metrics, "log_odds_chosen": masked_mean(log_odds.detach(), pairs.mask)})


def _alpha_reward(mean_logprobs: Tensor, alpha: float) -> Tensor:
    """``(1 - p^-α) / α`` from ``log p``; ``log p`` itself for α = 0. The exponent is capped where float32 ends."""
    if alpha == 0.0:
        return mean_logprobs
    return -torch.expm1((-alpha * mean_logprobs).clamp(max=_LARGEST_EXPONENT)) / alpha


def _log_odds(mean_logprobs: Tensor) -> Tensor:
    """``log(p / (1 - p))`` from ``log p``; ``1 - p = -expm1(log p)`` loses no digits near ``p = 1``."""
    bounded = mean_logprobs.clamp(max=-torch.finfo(mean_logprobs.dtype).eps)
    return bounded - torch.log(-torch.expm1(bounded))


class _Pairs:
    """Checked, masked and length-averaged inputs of the losses above."""

    def __init__(
        self,
        chosen: Tensor,
        rejected: Tensor,
        chosen_lengths: Tensor,
        rejected_lengths: Tensor,
        mask: Tensor | None,
        beta: float,
        label_smoothing: float,
    ) -> None:
        check_same_shape(
            chosen=chosen,
            rejected=rejected,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            mask=mask,
        )
        if chosen.dim() != 1:
            raise ValueError(
                f"chosen must be (B,), one summed log-prob per sequence, got {tuple(chosen.shape)}; "
                "sequence_logprobs(token_logprobs, mask) makes it"
            )
        if not beta > 0.0:
            raise ValueError(f"beta must be positive, got {beta}")
        if not 0.0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
        self.mask = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask.bool()
        self.chosen = select(full_precision(chosen), self.mask)
        self.rejected = select(full_precision(rejected), self.mask)
        self.chosen_lengths = chosen_lengths
        # A masked pair may have length 0 or anything else: 1 keeps the quotient finite.
        self.mean_chosen = self.chosen / select(chosen_lengths, self.mask, fill=1)
        self.mean_rejected = self.rejected / select(rejected_lengths, self.mask, fill=1)

    def output(
        self,
        losses: Tensor,
        chosen_reward: Tensor,
        rejected_reward: Tensor,
        nll_coef: float,
        mean_chosen_length: Tensor | float | None,
        denominator: Tensor | float | None,
    ) -> LossOutput:
        """Add the likelihood term, aggregate, and collect the metrics."""
        metrics = preference_metrics(chosen_reward, rejected_reward, self.chosen, self.rejected, self.mask)
        if nll_coef:
            if mean_chosen_length is None:
                if denominator is not None:
                    raise ValueError("the token-mean likelihood term needs mean_chosen_length beside a denominator")
                mean_chosen_length = masked_mean(full_precision(self.chosen_lengths), self.mask)
            nll = -self.chosen / mean_chosen_length
            losses = losses + nll_coef * nll
            metrics["nll_loss"] = masked_mean(nll.detach(), self.mask)
        return LossOutput(aggregate(losses, self.mask, denominator=denominator), metrics)
