"""Direct preference optimisation: one function for the whole DPO family, on summed log-probs of pairs of answers.

The per-pair formulas, the f-divergences, LD-DPO and WPO are in ``variants.py``, losses without a reference model in
``reference_free.py``.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import LossOutput, aggregate, check_same_shape, full_precision, masked_mean, select
from rlhfkit.losses.arguments import PAIR_ARGUMENTS, share_arguments
from rlhfkit.losses.preference.variants import (
    IGNORES_DIVERGENCE,
    PAIR_LOSSES,
    SORTS_THE_BATCH,
    USES_LABEL_SMOOTHING,
    Divergence,
    PairLoss,
    PreferencePairs,
    divergence_score,
)

# Mappings come first: jsonargparse 4 takes one in YAML for arguments of the class that a function returns.
LossTypes = str | Mapping[str, float] | PairLoss | Mapping[PairLoss, float] | Mapping[str | PairLoss, float]
"""A name from ``PAIR_LOSSES``, a function, or a weighted mixture of both: ``{"sigmoid": 1.0, "sft": 0.5}``."""


@share_arguments(PAIR_ARGUMENTS)
def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: LossTypes = "sigmoid",
    label_smoothing: float = 0.0,
    divergence: Divergence | Callable[[Tensor], Tensor] = "reverse_kl",
    divergence_alpha: float = 0.5,
    discopop_temperature: float = 0.05,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    mean_chosen_length: Tensor | float | None = None,
    weights: Tensor | None = None,
    nll_coef: float = 0.0,
    reference_free: bool = False,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Direct preference optimisation and its family.

    ``L = Σ_i m_i [w_i Σ_k c_k ℓ_k(i) - λ log π(y_c)/n_c] / D``; for ``sigmoid`` ``ℓ = -log σ(β (Δ_c - Δ_r))`` with
    ``Δ = log π(y|x) - log π_ref(y|x)``.

    DPO, Rafailov et al. (2023, arXiv:2305.18290, equation 7). :data:`PAIR_LOSSES` has formula and paper of every
    ``loss_type``.

    Args:
        beta: β > 0, strength of the tie to the reference; 0.1 as in the paper, TRL and OpenRLHF; far larger for
            ``sigmoid_norm`` (Tülu 3: 5).
        loss_type: A name from ``PAIR_LOSSES``, a function of :class:`PreferencePairs` returning (B,), or a mapping of
            those to weights ``c_k``, e.g. ``{"sigmoid": 1.0, "sft": 0.5}``. ``ipo`` is TRL's (means over tokens),
            ``ipo_sum`` OpenRLHF's (sums).
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong; ``sigmoid`` with ε > 0 is conservative
            DPO. Needed by ``exo_pair`` (TRL: 1e-3).
        divergence: Regulariser of f-DPO, see :func:`divergence_score`; or a function of Δ.
        divergence_alpha: α of ``divergence="alpha"`` (TRL's default), and only of it.
        discopop_temperature: τ of ``discopop``, or of a function that reads it; 0.05 as in its paper.
        chosen_lengths: (B,) completion tokens of the chosen answers; needed by ``ipo``, ``sigmoid_norm``, ``sft`` and
            ``nll_coef``.
        rejected_lengths: (B,) the same for the rejected answers; needed by ``ipo`` and ``sigmoid_norm``.
        mean_chosen_length: Mean tokens of a chosen answer over the whole optimizer step, for ``sft``; that of this call
            when ``None``, which is refused with a ``denominator``.
        weights: (B,) ``w``, detached here; for WPO the product of :func:`rlhfkit.losses.wpo_weights` of both answers.
        nll_coef: λ of the negative log-likelihood per token of each chosen answer (iterative RPO, Pang et al., 2024,
            arXiv:2404.19733; OpenRLHF's ``nll_loss_coef``). The loss type ``sft`` averages over all tokens instead.
        reference_free: Take ``π_ref`` as uniform; reference log-probs are then refused.
        denominator: ``D``: pairs of the whole optimizer step divided by the number of micro-batches averaged; the local
            count when ``None``. ``aot`` sorts within the call, so no denominator makes it independent of the split.

    Returns:
        The loss with metrics ``rewards/chosen``, ``rewards/rejected`` (both ``β Δ``), ``rewards/accuracies`` (ties are
        wrong), ``rewards/margins``, ``logps/chosen``, ``logps/rejected``, and ``nll_loss`` with ``nll_coef``.

    Raises:
        ValueError: If shapes differ, an argument is out of range, unknown or without effect, or something is missing.
    """
    _check_pairs(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths, weights, mask)
    _check_reference(ref_chosen, ref_rejected, reference_free)
    mixture = _mixture(loss_type)
    _check_arguments(
        mixture, beta, label_smoothing, divergence, sorted_needs_all=weights is not None or mask is not None
    )
    _check_belonging(mixture, divergence, divergence_alpha, discopop_temperature)
    keep = torch.ones_like(chosen, dtype=torch.bool) if mask is None else mask.bool()

    def prepare(values: Tensor) -> Tensor:
        return select(full_precision(values), keep)

    policy_chosen, policy_rejected = prepare(chosen), prepare(rejected)
    reference_chosen = torch.zeros_like(policy_chosen) if ref_chosen is None else prepare(ref_chosen.detach())
    reference_rejected = torch.zeros_like(policy_rejected) if ref_rejected is None else prepare(ref_rejected.detach())
    if chosen_lengths is not None:
        chosen_lengths = select(chosen_lengths, keep, fill=1)
        if mean_chosen_length is None and (denominator is None or "sft" not in mixture):
            mean_chosen_length = masked_mean(full_precision(chosen_lengths), keep)
    pairs = PreferencePairs(
        chosen=policy_chosen,
        rejected=policy_rejected,
        ref_chosen=reference_chosen,
        ref_rejected=reference_rejected,
        chosen_score=divergence_score(policy_chosen - reference_chosen, divergence, alpha=divergence_alpha),
        rejected_score=divergence_score(policy_rejected - reference_rejected, divergence, alpha=divergence_alpha),
        chosen_lengths=chosen_lengths,
        rejected_lengths=None if rejected_lengths is None else select(rejected_lengths, keep, fill=1),
        mean_chosen_length=mean_chosen_length,
        beta=beta,
        label_smoothing=label_smoothing,
        discopop_temperature=discopop_temperature,
    )
    losses = torch.zeros_like(policy_chosen)
    for pair_loss, coefficient in mixture.items():
        losses = losses + coefficient * (PAIR_LOSSES[pair_loss] if isinstance(pair_loss, str) else pair_loss)(pairs)
    if weights is not None:
        losses = losses * select(full_precision(weights.detach()), keep)
    metrics = preference_metrics(
        beta * pairs.chosen_logratio, beta * pairs.rejected_logratio, policy_chosen, policy_rejected, keep
    )
    if nll_coef:
        if chosen_lengths is None:
            raise ValueError("nll_coef averages over the tokens of each chosen answer: give chosen_lengths")
        nll = -policy_chosen / chosen_lengths
        losses = losses + nll_coef * nll
        metrics["nll_loss"] = masked_mean(nll.detach(), keep)
    return LossOutput(aggregate(losses, keep, denominator=denominator), metrics)


def preference_metrics(
    chosen_rewards: Tensor, rejected_rewards: Tensor, chosen: Tensor, rejected: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Metrics of a preference loss by the names TRL made common; means over the pairs that count, all detached."""
    chosen_rewards, rejected_rewards = chosen_rewards.detach(), rejected_rewards.detach()
    return {
        "rewards/chosen": masked_mean(chosen_rewards, mask),
        "rewards/rejected": masked_mean(rejected_rewards, mask),
        "rewards/accuracies": masked_mean((chosen_rewards > rejected_rewards).to(chosen_rewards.dtype), mask),
        "rewards/margins": masked_mean(chosen_rewards - rejected_rewards, mask),
        "logps/chosen": masked_mean(chosen.detach(), mask),
        "logps/rejected": masked_mean(rejected.detach(), mask),
    }


def _check_pairs(chosen: Tensor, rejected: Tensor, *others: Tensor | None) -> None:
    names = ("ref_chosen", "ref_rejected", "chosen_lengths", "rejected_lengths", "weights", "mask")
    check_same_shape(chosen=chosen, rejected=rejected, **dict(zip(names, others, strict=True)))
    if chosen.dim() != 1:
        raise ValueError(
            f"chosen must be (B,), one summed log-prob per sequence, got {tuple(chosen.shape)}; "
            "sequence_logprobs(token_logprobs, mask) makes it"
        )


def _check_reference(ref_chosen: Tensor | None, ref_rejected: Tensor | None, reference_free: bool) -> None:
    given = (ref_chosen is not None) + (ref_rejected is not None)
    if given != (0 if reference_free else 2):
        raise ValueError(
            "give ref_chosen and ref_rejected, or neither of them with reference_free=True; "
            f"got {given} of them with reference_free={reference_free}"
        )


def _mixture(loss_type: LossTypes) -> dict[str | PairLoss, float]:
    # The keys of a mapping are invariant: to mypy a Mapping[str, float] cannot fill a dict[str | PairLoss, float].
    mixture: dict[str | PairLoss, float] = (
        {**loss_type} if isinstance(loss_type, Mapping) else {loss_type: 1.0}  # type: ignore[dict-item]
    )
    if not mixture:
        raise ValueError("loss_type must name at least one loss, got an empty mapping")
    unknown = [name for name in mixture if not callable(name) and name not in PAIR_LOSSES]
    if unknown:
        raise ValueError(f"loss_type must be a function or one of {', '.join(PAIR_LOSSES)}, got {unknown[0]!r}")
    return mixture


def _check_arguments(
    mixture: Mapping[str | PairLoss, float],
    beta: float,
    label_smoothing: float,
    divergence: Divergence | Callable[[Tensor], Tensor],
    *,
    sorted_needs_all: bool,
) -> None:
    names = [name for name in mixture if isinstance(name, str)]
    custom = len(names) < len(mixture)  # a function may use any argument
    if not beta > 0.0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    if label_smoothing > 0.0 and not custom and not USES_LABEL_SMOOTHING.intersection(names):
        raise ValueError(f"label_smoothing has no effect on {names}; it belongs to {sorted(USES_LABEL_SMOOTHING)}")
    if divergence != "reverse_kl" and (fixed := IGNORES_DIVERGENCE.intersection(names)):
        raise ValueError(f"loss types {sorted(fixed)} are defined for divergence 'reverse_kl' only, got {divergence!r}")
    if sorted_needs_all and SORTS_THE_BATCH.intersection(names):
        raise ValueError("'aot' and 'aot_unpaired' sort the batch, so weights and mask have no meaning with them")


def _check_belonging(
    mixture: Mapping[str | PairLoss, float],
    divergence: Divergence | Callable[[Tensor], Tensor],
    alpha: float,
    temperature: float,
) -> None:
    """Refuse a parameter of one divergence, or of one loss, beside another."""
    if alpha != 0.5 and divergence != "alpha":
        raise ValueError(f"divergence_alpha={alpha} belongs to divergence 'alpha', got divergence={divergence!r}")
    if temperature != 0.05 and "discopop" not in mixture and all(isinstance(name, str) for name in mixture):
        raise ValueError(f"discopop_temperature={temperature} belongs to 'discopop', got loss_type {list(mixture)}")
