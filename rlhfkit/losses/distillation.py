"""Distillation: make the student's next-token distribution that of a teacher.

:func:`distillation_loss` compares whole distributions (or the teacher's top K tokens). From the teacher's log-prob of
each sampled token :func:`on_policy_distillation_advantages` makes any policy loss on-policy distillation. Mixed with
cross-entropy: ``(1 - c) * cross_entropy_loss(...).loss + c * distillation_loss(...).loss``.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
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

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
"""Divergences of :func:`distillation_loss`."""
Remainder = Literal["bucket", "renormalize"]
"""How the probability outside the top K is treated."""

LOG_ZERO = -1e4
"""Stands for log 0: its exponential is 0 in every dtype, and 0 * -1e4 is 0 where 0 * -inf is NaN."""


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence | Callable[[Tensor, Tensor], Tensor] = "forward_kl",
    temperature: float = 1.0,
    top_k: int | None = None,
    teacher_ids: Tensor | None = None,
    remainder: Remainder = "bucket",
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Divergence between the next-token distributions of teacher ``q`` and student ``p``, averaged over tokens.

    ``forward_kl``: ``ℓ_t = Σ_v q log(q/p)``; ``reverse_kl``: ``ℓ_t = Σ_v p log(p/q)``; ``jsd``:
    ``ℓ_t = w Σ_v q log(q/m) + (1-w) Σ_v p log(p/m)`` with ``m = w q + (1-w) p``; then :func:`aggregate`.

    Forward KL: Hinton et al. (2015, arXiv:1503.02531). Reverse KL: MiniLLM (Gu et al., 2023, arXiv:2306.08543).
    Generalised Jensen–Shannon divergence: GKD (Agarwal et al., 2023, arXiv:2306.13649). OpenRLHF's loss is the
    cross-entropy ``-Σ_v q log p``, forward KL plus the teacher's entropy, with the same gradient; its mask is one
    position off.

    Args:
        student: (B, T, V) logits or log-probs on the next-token axis.
        teacher: (B, T, V) the same for the teacher, detached here; or (B, T, K) log-probs of ``teacher_ids``.
        mask: (B, T), true where a token counts. Masked entries of the other tensors may hold anything, NaN
            included.
        divergence: One of the three, or a function of the log-probs ``(log p, log q)``, (..., V) each, to (...), as
            ``JensenShannon(0.1)`` is; that of ``jsd`` has ``w = 0.5``.
        temperature: τ > 0 by which both logits are divided. Gradients shrink with ``1/τ²``; Hinton undoes that by a
            factor ``τ²``, TRL and this loss do not.
        top_k: Compare only the K likeliest tokens of the teacher; all V when ``None``.
        teacher_ids: (B, T, K) distinct token ids of ``teacher``; entries of log-prob ``-inf`` are ignored.
        remainder: With K < V, ``bucket`` makes all other tokens one category, which keeps a true divergence;
            ``renormalize`` compares the conditional distributions over the K tokens.
        aggregation: The ``mode`` of :func:`aggregate`.
        denominator, max_length: See :func:`aggregate`.

    Returns:
        The loss with metric ``distillation/divergence``, nats per token of this micro-batch. Tokens of probability 0
        count with a log-prob of -1e4.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    token_loss = token_divergence(
        student,
        teacher,
        mask,
        divergence=divergence,
        temperature=temperature,
        top_k=top_k,
        teacher_ids=teacher_ids,
        remainder=remainder,
    )
    metrics = {"distillation/divergence": masked_mean(token_loss.detach(), mask)}
    return LossOutput(aggregate(token_loss, mask, aggregation, denominator, max_length=max_length), metrics)


def token_divergence(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    divergence: Divergence | Callable[[Tensor, Tensor], Tensor] = "forward_kl",
    temperature: float = 1.0,
    top_k: int | None = None,
    teacher_ids: Tensor | None = None,
    remainder: Remainder = "bucket",
) -> Tensor:
    """The ``ℓ_t`` of :func:`distillation_loss`, which has the arguments and errors: (B, T) nats, 0 where masked."""
    _check(student, teacher, mask, temperature, top_k, teacher_ids, remainder)
    compare = _divergence_function(divergence)
    keep = mask.bool()
    student = select(full_precision(student), keep.unsqueeze(-1)) / temperature
    teacher = select(full_precision(teacher.detach()), keep.unsqueeze(-1)) / temperature
    ids = None if teacher_ids is None else select(teacher_ids, keep.unsqueeze(-1))
    student, teacher = _on_common_support(student, teacher, ids, top_k, remainder)
    return select(compare(student.clamp(min=LOG_ZERO), teacher.clamp(min=LOG_ZERO)), keep)


def on_policy_distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Per-token advantage that turns any policy loss into on-policy distillation.

    ``A_t = log q(y_t) - log p(y_t)``, detached: minus the one-sample reverse KL of the token.

    The sampled reverse KL of MiniLLM (Gu et al., 2023, arXiv:2306.08543) and GKD (arXiv:2306.13649), per token and
    undiscounted as in Lu and Thinking Machines Lab ("On-Policy Distillation", 2025), who take :func:`reinforce_loss`.

    Args:
        logprobs: (B, T) log-probs ``log p`` of the sampled tokens under the student.
        teacher_logprobs: (B, T) under the teacher.
        mask: (B, T), true at sampled tokens. Masked entries may hold anything.

    Returns:
        (B, T) detached, in at least float32; 0 where masked.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs, mask=mask)
    student, teacher = full_precision(logprobs.detach()), full_precision(teacher_logprobs.detach())
    return select(teacher, mask) - select(student, mask)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """``Σ_v q log(q/p)``, (...), from log-probs of student ``p`` and teacher ``q``, (..., V) each."""
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """``Σ_v p log(p/q)``, (...), from log-probs of student ``p`` and teacher ``q``, (..., V) each."""
    return (student.exp() * (student - teacher)).sum(-1)


@dataclass(frozen=True)
class JensenShannon:
    """``w Σ_v q log(q/m) + (1-w) Σ_v p log(p/m)`` with ``m = w q + (1-w) p`` (GKD, arXiv:2306.13649).

    Args:
        teacher_weight: ``w`` in (0, 1); 0.5 in TRL's GKD (its β). ``w → 0``: like forward KL, 1: like reverse KL.

    Raises:
        ValueError: If it is out of range.
    """

    teacher_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.teacher_weight < 1.0:
            raise ValueError(f"JensenShannon.teacher_weight must lie in (0, 1), got {self.teacher_weight}")

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(...) from log-probs of student ``p`` and teacher ``q``, (..., V) each."""
        weight = self.teacher_weight
        mixture = torch.logaddexp(teacher + math.log(weight), student + math.log1p(-weight))
        to_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
        return weight * to_teacher + (1.0 - weight) * (student.exp() * (student - mixture)).sum(-1)


_DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": JensenShannon()}
)


def _divergence_function(
    divergence: Divergence | Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of the log-probs of student and teacher that an argument names; ValueError if there is none."""
    if callable(divergence):
        names = [*inspect.signature(divergence).parameters, "", ""]
        if "teacher" in names[0] or "student" in names[1]:
            raise ValueError(
                f"divergence is given the log-probs of the student and then those of the teacher, and {divergence!r} "
                f"takes {names[0]} and then {names[1]}: exchange them"
            )
        return divergence
    if divergence not in _DIVERGENCES:
        raise ValueError(f"divergence must be a function or one of {', '.join(_DIVERGENCES)}, got {divergence!r}")
    return _DIVERGENCES[divergence]


def _on_common_support(
    student: Tensor, teacher: Tensor, ids: Tensor | None, top_k: int | None, remainder: Remainder
) -> tuple[Tensor, Tensor]:
    """Log-probs of student and teacher over the same categories: all V, or K plus one for the rest with ``bucket``."""
    if ids is None and top_k is None:
        return student.log_softmax(-1), teacher.log_softmax(-1)
    if ids is None:
        assert top_k is not None
        teacher, ids = teacher.log_softmax(-1).topk(top_k, -1)
    elif top_k is not None:
        teacher, order = teacher.topk(top_k, -1)
        ids = ids.gather(-1, order)
    absent = torch.isneginf(teacher)
    if remainder == "renormalize":
        return student.gather(-1, ids).masked_fill(absent, -torch.inf).log_softmax(-1), teacher.log_softmax(-1)
    student = student.log_softmax(-1).gather(-1, ids).masked_fill(absent, -torch.inf)
    return _with_rest(student), _with_rest(teacher)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log of the probability that is missing from 1, (..., K) to (..., K + 1)."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], -1)


def _check(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    temperature: float,
    top_k: int | None,
    teacher_ids: Tensor | None,
    remainder: Remainder,
) -> None:
    if student.shape[:-1] != mask.shape or teacher.shape[:-1] != mask.shape:
        raise ValueError(
            "student and teacher must be (B, T, V) and mask (B, T), got "
            f"{tuple(student.shape)}, {tuple(teacher.shape)} and {tuple(mask.shape)}"
        )
    if teacher_ids is None and student.shape != teacher.shape:
        raise ValueError(
            f"student and teacher must share one vocabulary, got {student.shape[-1]} and {teacher.shape[-1]} tokens; "
            "a teacher given for some tokens only needs teacher_ids"
        )
    check_same_shape(teacher=teacher, teacher_ids=teacher_ids if teacher_ids is not None else teacher)
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if top_k is not None and not 1 <= top_k <= teacher.shape[-1]:
        raise ValueError(f"top_k must lie in [1, {teacher.shape[-1]}], got {top_k}")
    if remainder not in ("bucket", "renormalize"):
        raise ValueError(f"remainder must be 'bucket' or 'renormalize', got {remainder!r}")
    if teacher_ids is not None and remainder == "bucket" and temperature != 1.0:
        raise ValueError(
            "a teacher given for some tokens only cannot be brought to another temperature with remainder='bucket': "
            "its normaliser is unknown; use remainder='renormalize' or temperature=1"
        )
