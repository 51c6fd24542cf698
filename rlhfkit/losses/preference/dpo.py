"""Direct preference optimisation: one function for the whole DPO family, on summed log-probs of pairs of answers.

A per-pair loss takes :class:`PreferencePairs` and returns (B,). :func:`dpo_loss` looks names up in :data:`PAIR_LOSSES`
and accepts any other function of this signature. Losses without a reference model are in ``reference_free.py``.

Notation: ``Δ = log π(y|x) - log π_ref(y|x)`` of the chosen (``Δ_c``) and the rejected (``Δ_r``) answer, ``s`` the score
of the f-divergence (``s(Δ) = Δ`` for reverse KL), ``h = s(Δ_c) - s(Δ_r)``, ``n_c`` and ``n_r`` completion lengths in
tokens, ``ε`` label smoothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfkit.losses.aggregation import LossOutput, aggregate, check_same_shape, full_precision, masked_mean, select

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
"""Names of :data:`DIVERGENCES`."""

_MAX_EXPONENT = 80.0  # e^80 is 5.5e34: differences of two such scores stay finite in float32


def reverse_kl(logratio: Tensor) -> Tensor:
    """``Δ``. Reverse KL, the divergence of DPO (arXiv:2305.18290)."""
    return logratio


def forward_kl(logratio: Tensor) -> Tensor:
    """``1 - e^-Δ``. Forward KL, mass covering (arXiv:2309.16240)."""
    return -torch.expm1((-logratio).clamp(max=_MAX_EXPONENT))


def jensen_shannon(logratio: Tensor) -> Tensor:
    """``log 2 + log σ(Δ)``. Jensen–Shannon, bounded above (arXiv:2309.16240)."""
    return math.log(2.0) + F.logsigmoid(logratio)


@dataclass(frozen=True)
class AlphaDivergence:
    """``(e^((α-1)Δ) - 1) / (α - 1)``. ``α → 1`` is reverse KL, 0 forward KL (arXiv:2309.16240).

    Args:
        alpha: α; 0.5 is TRL's default. The paper's is ``1 - alpha``.
    """

    alpha: float = 0.5

    def __call__(self, logratio: Tensor) -> Tensor:
        """Scores of the shape of ``logratio``."""
        if self.alpha == 1.0:
            return logratio
        return torch.expm1(((self.alpha - 1.0) * logratio).clamp(max=_MAX_EXPONENT)) / (self.alpha - 1.0)


DIVERGENCES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "js": jensen_shannon, "alpha": AlphaDivergence()}
)
"""Scores ``s(Δ)`` of an answer under an f-divergence, of the shape of ``Δ = log π(y|x) - log π_ref(y|x)``.

f-DPO, Wang et al. (2023, arXiv:2309.16240): the implicit reward is ``β f'(u)`` of ``u = π / π_ref``, up to constants,
chosen here such that the score of ratio 1 is 0. Exponents are clamped at 80, beyond which float32 would overflow; TRL
clamps only ``alpha``, and fails in float64 (1.16.0: KeyError in its table of limits)."""


class PreferencePairs(NamedTuple):
    """The argument of a per-pair loss. All tensors are (B,) and at least float32.

    Attributes:
        chosen: Summed log-probs of the chosen answers under the policy.
        rejected: The same for the rejected answers.
        ref_chosen: The same for the chosen answers under the reference model; zeros when there is none.
        ref_rejected: The same for the rejected answers.
        chosen_score: ``s(Δ_c)``.
        rejected_score: ``s(Δ_r)``.
        chosen_lengths: Tokens; ``None`` when not given.
        rejected_lengths: Tokens; ``None`` when not given.
        mean_chosen_length: Scalar, mean tokens of a chosen answer over the optimizer step.
        beta: β.
        label_smoothing: ε, the probability that a label is wrong.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    chosen_lengths: Tensor | None = None
    rejected_lengths: Tensor | None = None
    mean_chosen_length: Tensor | float | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0

    @property
    def chosen_logratio(self) -> Tensor:
        """``Δ_c``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_logratio(self) -> Tensor:
        """``Δ_r``."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """``h``."""
        return self.chosen_score - self.rejected_score

    @property
    def mean_margin(self) -> Tensor:
        """``s(Δ_c) / n_c - s(Δ_r) / n_r``."""
        if self.chosen_lengths is None or self.rejected_lengths is None:
            raise ValueError("this loss_type averages over tokens: give chosen_lengths and rejected_lengths")
        return self.chosen_score / self.chosen_lengths - self.rejected_score / self.rejected_lengths


PairLoss = Callable[[PreferencePairs], Tensor]
"""A per-pair loss: :class:`PreferencePairs` in, (B,) out."""


def smoothed_logsigmoid_loss(logits: Tensor, label_smoothing: float) -> Tensor:
    """``-(1-ε) log σ(z) - ε log σ(-z)``: binary cross-entropy with a label that is wrong with probability ε."""
    if label_smoothing == 0.0:
        return -F.logsigmoid(logits)
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def sigmoid(pairs: PreferencePairs) -> Tensor:
    """``-(1-ε) log σ(βh) - ε log σ(-βh)``. DPO (arXiv:2305.18290); ε > 0 is conservative DPO (Mitchell, 2023)."""
    return smoothed_logsigmoid_loss(pairs.beta * pairs.margin, pairs.label_smoothing)


def sigmoid_norm(pairs: PreferencePairs) -> Tensor:
    """``-log σ(β (s(Δ_c)/n_c - s(Δ_r)/n_r))``, smoothed. Length-normalised DPO, Tülu 3 (arXiv:2411.15124)."""
    return smoothed_logsigmoid_loss(pairs.beta * pairs.mean_margin, pairs.label_smoothing)


def hinge(pairs: PreferencePairs) -> Tensor:
    """``max(0, 1 - βh)``. SLiC with a reference, as in RSO (arXiv:2309.06657)."""
    return torch.relu(1.0 - pairs.beta * pairs.margin)


def ipo(pairs: PreferencePairs) -> Tensor:
    """``(s(Δ_c)/n_c - s(Δ_r)/n_r - 1/(2β))²``. IPO on means (arXiv:2310.12036), as its authors and TRL run it."""
    return (pairs.mean_margin - 1.0 / (2.0 * pairs.beta)).square()


def ipo_sum(pairs: PreferencePairs) -> Tensor:
    """``(h - 1/(2β))²``. IPO on summed log-probs (arXiv:2310.12036, equation 17), as OpenRLHF runs it."""
    return (pairs.margin - 1.0 / (2.0 * pairs.beta)).square()


def exo_pair(pairs: PreferencePairs) -> Tensor:
    """``σ(βh) (log σ(βh) - log(1-ε)) + σ(-βh) (log σ(-βh) - log ε)``, ε > 0. EXO (arXiv:2402.00856)."""
    if pairs.label_smoothing <= 0.0:
        raise ValueError("loss_type 'exo_pair' needs label_smoothing > 0; TRL suggests 1e-3")
    logits, smoothing = pairs.beta * pairs.margin, pairs.label_smoothing
    keep = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-smoothing))
    return keep + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(smoothing))


def nca_pair(pairs: PreferencePairs) -> Tensor:
    """``-log σ(βΔ_c) - ½ log σ(-βΔ_c) - ½ log σ(-βΔ_r)``. Noise contrastive alignment (arXiv:2402.05369)."""
    chosen, rejected = pairs.beta * pairs.chosen_logratio, pairs.beta * pairs.rejected_logratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: PreferencePairs) -> Tensor:
    """``[-(1-ε) log σ(βh) + ε log σ(-βh)] / (1-2ε)``, unbiased under label noise ε. Robust DPO (arXiv:2403.00409)."""
    logits, smoothing = pairs.beta * pairs.margin, pairs.label_smoothing
    loss = -(1.0 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)
    return loss / (1.0 - 2.0 * smoothing)


def bco_pair(pairs: PreferencePairs) -> Tensor:
    """``-log σ(βΔ_c) - log σ(-βΔ_r)``. Binary classifier optimisation (arXiv:2404.04656) without its shift δ."""
    chosen, rejected = pairs.beta * pairs.chosen_logratio, pairs.beta * pairs.rejected_logratio
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: PreferencePairs) -> Tensor:
    """``(Δ_c - 1/(2β))² + (Δ_r + 1/(2β))²``. SPPO with hard win probabilities 1 and 0 (arXiv:2405.00675)."""
    target = 0.5 / pairs.beta
    return (pairs.chosen_logratio - target).square() + (pairs.rejected_logratio + target).square()


def aot(pairs: PreferencePairs) -> Tensor:
    """``-log σ(β (sort(log π_c/π_r) - sort(log ref_c/ref_r)))``, smoothed. Optimal transport (arXiv:2406.05882)."""
    policy = (pairs.chosen - pairs.rejected).sort(dim=0).values
    reference = (pairs.ref_chosen - pairs.ref_rejected).sort(dim=0).values
    return smoothed_logsigmoid_loss(pairs.beta * (policy - reference), pairs.label_smoothing)


def aot_unpaired(pairs: PreferencePairs) -> Tensor:
    """``-log σ(β (sort(Δ_c) - sort(Δ_r)))``, smoothed. Optimal transport, unpaired (arXiv:2406.05882)."""
    difference = pairs.chosen_logratio.sort(dim=0).values - pairs.rejected_logratio.sort(dim=0).values
    return smoothed_logsigmoid_loss(pairs.beta * difference, pairs.label_smoothing)


def apo_zero(pairs: PreferencePairs) -> Tensor:
    """``1 - σ(βΔ_c) + σ(βΔ_r)``: chosen up, rejected down. Anchored preference (arXiv:2408.06266)."""
    return torch.sigmoid(-pairs.beta * pairs.chosen_logratio) + torch.sigmoid(pairs.beta * pairs.rejected_logratio)


def apo_down(pairs: PreferencePairs) -> Tensor:
    """``σ(βΔ_c) + 1 - σ(β(Δ_c - Δ_r))``: both down, rejected further. Anchored preference (arXiv:2408.06266)."""
    chosen, rejected = pairs.chosen_logratio, pairs.rejected_logratio
    return torch.sigmoid(pairs.beta * chosen) + torch.sigmoid(-pairs.beta * (chosen - rejected))


@dataclass(frozen=True)
class DiscoPOP:
    """``(1-m) (-log σ(z)) + m e^-z`` with ``z = βh``, ``m = σ(z/τ)``. DiscoPOP (arXiv:2406.08414).

    Args:
        temperature: τ; 0.05 as in the paper and TRL.

    Raises:
        ValueError: If it is not positive.
    """

    temperature: float = 0.05

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(f"DiscoPOP.temperature must be positive, got {self.temperature}")

    def __call__(self, pairs: PreferencePairs) -> Tensor:
        """(B,) losses of the pairs."""
        logits = pairs.beta * pairs.margin
        modulation = logits / self.temperature
        logistic = torch.sigmoid(-modulation) * -F.logsigmoid(logits)
        # m e^-z as one exponential: for z far below 0 the factors, which TRL multiplies, are 0 and infinity.
        return logistic + torch.exp(F.logsigmoid(modulation) - logits)


def sft(pairs: PreferencePairs) -> Tensor:
    """``-log π_c / mean(n_c)``: cross-entropy per chosen token, to be mixed in. Llama 3 (arXiv:2407.21783)."""
    if pairs.mean_chosen_length is None:
        raise ValueError(
            "loss_type 'sft' averages over tokens: give chosen_lengths, and with a denominator mean_chosen_length too, "
            "or take nll_coef, which averages over those of each answer"
        )
    return -pairs.chosen / pairs.mean_chosen_length


PAIR_LOSSES: Mapping[str, PairLoss] = MappingProxyType(
    {
        loss.__name__: loss
        for loss in (
            *(sigmoid, sigmoid_norm, hinge, ipo, ipo_sum, exo_pair, nca_pair, robust, bco_pair, sppo_hard),
            *(aot, aot_unpaired, apo_zero, apo_down, sft),
        )
    }
    | {"discopop": DiscoPOP()}
)
"""The named per-pair losses: TRL's fifteen and ``ipo_sum``."""

USES_LABEL_SMOOTHING = frozenset({"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"})
IGNORES_DIVERGENCE = frozenset({"nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"})
SORTS_THE_BATCH = frozenset({"aot", "aot_unpaired"})

# Mappings come first: jsonargparse 4 takes one in YAML for arguments of the class that a function returns.
LossTypes = str | Mapping[str, float] | PairLoss | Mapping[PairLoss, float] | Mapping[str | PairLoss, float]
"""A name from ``PAIR_LOSSES``, a function, or a weighted mixture of both: ``{"sigmoid": 1.0, "sft": 0.5}``."""


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
        chosen: (B,) summed log-probs of the chosen answers under the policy, see :func:`sequence_logprobs`.
        rejected: (B,) the same for the rejected answers.
        ref_chosen: (B,) summed log-probs of the chosen answers under the reference model; detached here.
        ref_rejected: (B,) the same for the rejected answers.
        beta: β > 0, strength of the tie to the reference; 0.1 as in the paper, TRL and OpenRLHF; far larger for
            ``sigmoid_norm`` (Tülu 3: 5).
        loss_type: A name from ``PAIR_LOSSES``, a function of :class:`PreferencePairs` returning (B,), or a mapping of
            those to weights ``c_k``, e.g. ``{"sigmoid": 1.0, "sft": 0.5}``. ``ipo`` is TRL's (means over tokens),
            ``ipo_sum`` OpenRLHF's (sums). ``DiscoPOP(0.1)`` is ``discopop`` with another
            temperature.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong; ``sigmoid`` with ε > 0 is conservative
            DPO. Needed by ``exo_pair`` (TRL: 1e-3).
        divergence: Regulariser of f-DPO, a name from :data:`DIVERGENCES` or a function of Δ, such as
            ``AlphaDivergence(0.3)``.
        chosen_lengths: (B,) completion tokens of the chosen answers; needed by ``ipo``, ``sigmoid_norm``, ``sft`` and
            ``nll_coef``.
        rejected_lengths: (B,) the same for the rejected answers; needed by ``ipo`` and ``sigmoid_norm``.
        mean_chosen_length: Mean tokens of a chosen answer over the whole optimizer step, for ``sft``; that of this call
            when ``None``, which is refused with a ``denominator``.
        weights: (B,) ``w``, detached here; for WPO the product of :func:`rlhfkit.losses.wpo_weights` of both answers.
        nll_coef: λ of the negative log-likelihood per token of each chosen answer (iterative RPO, Pang et al., 2024,
            arXiv:2404.19733; OpenRLHF's ``nll_loss_coef``). The loss type ``sft`` averages over all tokens instead.
        reference_free: Take ``π_ref`` as uniform; reference log-probs are then refused.
        mask: (B,) pairs that count, all when ``None``; the other rows may hold anything.
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
    score = divergence if callable(divergence) else DIVERGENCES[divergence]
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
        chosen_score=score(policy_chosen - reference_chosen),
        rejected_score=score(policy_rejected - reference_rejected),
        chosen_lengths=chosen_lengths,
        rejected_lengths=None if rejected_lengths is None else select(rejected_lengths, keep, fill=1),
        mean_chosen_length=mean_chosen_length,
        beta=beta,
        label_smoothing=label_smoothing,
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


def refuse_list(loss_type: object) -> None:
    """Raise TypeError for several losses without weights, which TRL takes."""
    if isinstance(loss_type, list | tuple):
        weights = "{'sigmoid': 1.0, 'sft': 0.2}"
        raise TypeError(f"several losses are a mapping to their weights, {weights}, got {loss_type}")


def _mixture(loss_type: LossTypes) -> dict[str | PairLoss, float]:
    refuse_list(loss_type)
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
    if not callable(divergence) and divergence not in DIVERGENCES:
        raise ValueError(f"divergence must be a function or one of {', '.join(DIVERGENCES)}, got {divergence!r}")
    if divergence != "reverse_kl" and (fixed := IGNORES_DIVERGENCE.intersection(names)):
        raise ValueError(f"loss types {sorted(fixed)} are defined for divergence 'reverse_kl' only, got {divergence!r}")
    if sorted_needs_all and SORTS_THE_BATCH.intersection(names):
        raise ValueError(
            "'aot' and 'aot_unpaired' sort the batch, so weights and mask have no meaning with them: take another "
            "loss_type, or leave both out"
        )


# ---------------------------------------------------------------------- log-probs and weights of answers


def length_desensitized_logprobs(logprobs: Tensor, mask: Tensor, public_lengths: Tensor, *, alpha: float) -> Tensor:
    """Sequence log-prob in which tokens beyond the shorter answer's length are weighted by ``alpha``.

    ``Σ_{t ≤ p} log π(y_t) + α Σ_{t > p} log π(y_t)`` with the public length ``p = min(n_chosen, n_rejected)``.

    LD-DPO, Liu et al. (2024, arXiv:2409.06411), for policy and reference alike, before :func:`dpo_loss`.

    Args:
        logprobs: (B, T) token log-probs on the next-token axis. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion; tokens are counted along it, so gaps do not matter.
        public_lengths: (B,) tokens, ``torch.minimum(chosen_mask.sum(-1), rejected_mask.sum(-1))``.
        alpha: In [0, 1]; 1 is :func:`sequence_logprobs`. No default: the paper tunes it per model.

    Returns:
        (B,) in at least float32.

    Raises:
        ValueError: If the shapes do not fit or ``alpha`` is out of range.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    if public_lengths.shape != logprobs.shape[:-1]:
        raise ValueError(f"public_lengths must be {tuple(logprobs.shape[:-1])}, got {tuple(public_lengths.shape)}")
    position = mask.bool().long().cumsum(-1)  # 1 for the first selected token
    selected = select(full_precision(logprobs), mask)
    return torch.where(position <= public_lengths.unsqueeze(-1), selected, alpha * selected).sum(-1)


def wpo_weights(logprobs: Tensor, mask: Tensor, log_sum_squares: Tensor) -> Tensor:
    """Weight of one sequence in weighted preference optimisation: how likely the current policy is to write it.

    ``w(x, y) = exp(1/|y| Σ_t [log π(y_t) - log Σ_v π(v)²])``, detached.

    WPO, Zhou et al. (2024, arXiv:2406.11827), with its sampled alignment. A pair has the product of the weights of both
    answers: ``dpo_loss(..., weights=wpo_weights(chosen...) * wpo_weights(rejected...))``. Not capped, as in TRL 1.16.

    Args:
        logprobs: (B, T) token log-probs of the policy. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion.
        log_sum_squares: (B, T) log of the sum over the vocabulary of squared probabilities, ``torch.logsumexp(2 *
            log_softmax(logits), -1)``.

    Returns:
        (B,) detached, in at least float32.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, mask=mask, log_sum_squares=log_sum_squares)
    alignment = full_precision(logprobs.detach()) - full_precision(log_sum_squares.detach())
    return masked_mean(alignment, mask, -1).exp()


# ---------------------------------------------------------------------- pairs among the samples of a prompt


def best_and_worst(rewards: Tensor, group: Tensor) -> Tensor:
    """Choose the best and the worst sample of each group: 1 for the best, -1 for the worst, 0 for the others.

    ``y_c = argmax_i r_i`` and ``y_r = argmin_i r_i`` over the scored samples of a prompt, the first of equal ones.

    OAIF, Guo et al. (2024, arXiv:2402.04792) for two samples; the pairs of OpenRLHF's iterative DPO for more. Those
    make a pair of equal answers, too; here a group of equal rewards has none, since nothing was preferred.

    Args:
        rewards: (N,), NaN where missing.
        group: (N,) integers, equal for the samples of one prompt.

    Returns:
        (N,) of the dtype of ``rewards``.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(rewards=rewards, group=group)
    signs = torch.zeros_like(rewards)
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    values = rewards.tolist()
    for rows in members.values():
        scored = [row for row in rows if values[row] == values[row]]  # NaN differs from itself
        if not scored:
            continue
        best, worst = max(scored, key=values.__getitem__), min(scored, key=values.__getitem__)
        if values[best] > values[worst]:
            signs[best], signs[worst] = 1.0, -1.0
    return signs


def pair_partners(signs: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rejected answer of each chosen one, with fixed shapes, so that nothing waits for the device.

    Args:
        signs: (B,) 1 for chosen answers, -1 for rejected ones, 0 for others; a group has at most one of each.
        group: (B,) integers, equal for the samples of one prompt.

    Returns:
        ``partners`` (B, B) bool, true at ``[i, j]`` if j is the rejected answer to the chosen i, and ``pairs`` (B,)
        bool, true for chosen answers that have one.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(signs=signs, group=group)
    partners = (group[:, None] == group) & (signs > 0)[:, None] & (signs < 0)
    return partners, partners.any(-1)


def rejected_values(partners: Tensor, values: Tensor) -> Tensor:
    """(B,) values of the rejected answers at the rows of the chosen ones, 0 elsewhere.

    A sum and no matrix product, which autocasting would compute in 16 bits.

    Args:
        partners: (B, B) from :func:`pair_partners`.
        values: (B,).
    """
    return torch.where(partners, values, 0).sum(-1)
