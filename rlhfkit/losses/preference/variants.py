"""Variants of DPO: per-pair losses by TRL's names, f-divergences, length-desensitised log-probs and WPO's weights.

A per-pair loss takes :class:`PreferencePairs` and returns (B,). :func:`rlhfkit.losses.dpo_loss` looks names up in
:data:`PAIR_LOSSES` and accepts any other function of this signature.

Notation: ``Δ = log π(y|x) - log π_ref(y|x)`` of the chosen (``Δ_c``) and the rejected (``Δ_r``) answer, ``s`` the score
of the f-divergence (``s(Δ) = Δ`` for reverse KL), ``h = s(Δ_c) - s(Δ_r)``, ``n_c`` and ``n_r`` completion lengths in
tokens, ``ε`` label smoothing.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape, full_precision, masked_mean, select

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
"""f-divergences; see :func:`divergence_score`."""

_MAX_EXPONENT = 80.0  # e^80 is 5.5e34: differences of two such scores stay finite in float32


def _reverse_kl(logratio: Tensor, alpha: float) -> Tensor:
    return logratio


def _forward_kl(logratio: Tensor, alpha: float) -> Tensor:
    return -torch.expm1((-logratio).clamp(max=_MAX_EXPONENT))


def _jensen_shannon(logratio: Tensor, alpha: float) -> Tensor:
    return math.log(2.0) + F.logsigmoid(logratio)


def _alpha(logratio: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return logratio
    return torch.expm1(((alpha - 1.0) * logratio).clamp(max=_MAX_EXPONENT)) / (alpha - 1.0)


_SCORES: Mapping[str, Callable[[Tensor, float], Tensor]] = MappingProxyType(
    {"reverse_kl": _reverse_kl, "forward_kl": _forward_kl, "js": _jensen_shannon, "alpha": _alpha}
)


def divergence_score(
    logratio: Tensor, divergence: Divergence | Callable[[Tensor], Tensor] = "reverse_kl", *, alpha: float = 0.5
) -> Tensor:
    """Score of an answer under an f-divergence, as a function of ``Δ = log π(y|x) - log π_ref(y|x)``.

    ==============  ==============================  =============================================
    divergence      score ``s(Δ)``                  note
    ==============  ==============================  =============================================
    ``reverse_kl``  ``Δ``                           DPO
    ``forward_kl``  ``1 - e^-Δ``                    mass covering
    ``js``          ``log 2 + log σ(Δ)``            bounded above
    ``alpha``       ``(e^((α-1)Δ) - 1) / (α - 1)``  ``α → 1`` is reverse KL, ``α = 0`` forward KL
    ==============  ==============================  =============================================

    f-DPO, Wang et al. (2023, arXiv:2309.16240): the implicit reward is ``β f'(u)`` of ``u = π / π_ref``, up to
    constants, chosen here such that the score of ratio 1 is 0. The paper's α is ``1 - alpha``; this parametrisation is
    TRL's. Exponents are clamped at 80, beyond which float32 would overflow; TRL clamps only ``alpha``, and fails in
    float64 (1.16.0: KeyError in its table of limits).

    Args:
        logratio: Δ, any shape.
        divergence: One of the four, or a function of Δ.
        alpha: α of ``divergence="alpha"``; 0.5 is TRL's default. Others ignore it.

    Returns:
        Scores of the shape of ``logratio``.

    Raises:
        ValueError: If the name is unknown.
    """
    if callable(divergence):
        return divergence(logratio)
    if divergence not in _SCORES:
        raise ValueError(f"divergence must be a function or one of {', '.join(_SCORES)}, got {divergence!r}")
    return _SCORES[divergence](logratio, alpha)


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
        discopop_temperature: τ of the DiscoPOP loss.
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
    discopop_temperature: float = 0.05

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


def discopop(pairs: PreferencePairs) -> Tensor:
    """``(1-m) (-log σ(z)) + m e^-z`` with ``z = βh``, ``m = σ(z/τ)``. DiscoPOP (arXiv:2406.08414)."""
    logits = pairs.beta * pairs.margin
    modulation = logits / pairs.discopop_temperature
    logistic = torch.sigmoid(-modulation) * -F.logsigmoid(logits)
    # m e^-z as one exponential: for z far below 0 the factors, which TRL multiplies, are 0 and infinity.
    return logistic + torch.exp(F.logsigmoid(modulation) - logits)


def sft(pairs: PreferencePairs) -> Tensor:
    """``-log π_c / mean(n_c)``: cross-entropy per chosen token, to be mixed in. Llama 3 (arXiv:2407.21783)."""
    if pairs.mean_chosen_length is None:
        raise ValueError(
            "loss_type 'sft' averages over tokens: give chosen_lengths, and with a denominator mean_chosen_length too"
        )
    return -pairs.chosen / pairs.mean_chosen_length


PAIR_LOSSES: Mapping[str, PairLoss] = MappingProxyType(
    {
        loss.__name__: loss
        for loss in (
            *(sigmoid, sigmoid_norm, hinge, ipo, ipo_sum, exo_pair, nca_pair, robust, bco_pair, sppo_hard),
            *(aot, aot_unpaired, apo_zero, apo_down, discopop, sft),
        )
    }
)
"""The named per-pair losses: TRL's fifteen and ``ipo_sum``."""

USES_LABEL_SMOOTHING = frozenset({"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"})
IGNORES_DIVERGENCE = frozenset({"nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"})
SORTS_THE_BATCH = frozenset({"aot", "aot_unpaired"})


def length_desensitized_logprobs(logprobs: Tensor, mask: Tensor, public_lengths: Tensor, *, alpha: float) -> Tensor:
    """Sequence log-prob in which tokens beyond the shorter answer's length are weighted by ``alpha``.

    ``Σ_{t ≤ p} log π(y_t) + α Σ_{t > p} log π(y_t)`` with the public length ``p = min(n_chosen, n_rejected)``.

    LD-DPO, Liu et al. (2024, arXiv:2409.06411), for policy and reference alike, before :func:`rlhfkit.losses.dpo_loss`.

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
