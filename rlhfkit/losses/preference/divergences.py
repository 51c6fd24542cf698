"""f-divergences for direct preference optimisation: what replaces the log-ratio when the regulariser is not reverse KL.

f-DPO, Wang et al. (2023, arXiv:2309.16240): with regulariser ``D_f`` the implicit reward of an answer is ``β f'(u)`` of
the probability ratio ``u = π / π_ref``. Constants cancel in the difference of two answers; they are chosen here such
that the score of ratio 1 is 0.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
"""Names of the f-divergences; see :func:`divergence_score`."""

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

    ==============  ==============================  ==========================================
    divergence      score ``s(Δ)``                  note
    ==============  ==============================  ==========================================
    ``reverse_kl``  ``Δ``                           DPO
    ``forward_kl``  ``1 - e^-Δ``                    mass covering
    ``js``          ``log 2 + log σ(Δ)``            bounded above
    ``alpha``       ``(e^((α-1)Δ) - 1) / (α - 1)``  ``α → 1`` is reverse KL, ``α = 0`` forward KL
    ==============  ==============================  ==========================================

    f-DPO, Wang et al. (2023, arXiv:2309.16240). Its α is ``1 - alpha`` here; this parametrisation is TRL's.
    Exponents are clamped at 80, beyond which score and gradient would overflow float32; TRL clamps only ``alpha``,
    which it cannot compute in float64 (1.16.0: KeyError in its table of limits).

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
