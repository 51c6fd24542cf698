"""Distillation from a teacher with another vocabulary: distributions over spans of the same text.

Tokens that write the same text are compared with each other, the others as sorted lists of probabilities.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhfkit.losses.aggregation import (
    Aggregation,
    LossOutput,
    aggregate,
    check_same_shape,
    full_precision,
    masked_mean,
    select,
)
from rlhfkit.losses.arguments import AGGREGATION_ARGUMENTS, share_arguments
from rlhfkit.losses.distillation import LOG_ZERO, Divergence, divergence_function


def universal_logit_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Distance between distributions over vocabularies of which no token is known to be the same.

    ``d = Σ_i |p_(i) - q_(i)|`` with ``p_(1) ≥ p_(2) ≥ ...`` the sorted probabilities, the shorter list filled with 0.

    Universal logit distillation (Boizard et al., 2024, arXiv:2402.12030): the Wasserstein distance of the two where all
    tokens are equally far from one another.

    Args:
        student: (..., V) log-probs; they may sum to less than 1.
        teacher: (..., W) log-probs, detached here.

    Returns:
        (...) in [0, 2], in at least float32.

    Raises:
        ValueError: If the other sizes differ.
    """
    if student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(
            f"student and teacher must be (..., V) and (..., W), got {tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    size = max(student.shape[-1], teacher.shape[-1])
    first, second = (
        pad(full_precision(side).exp().sort(-1, descending=True).values, (0, size - side.shape[-1]))
        for side in (student, teacher.detach())
    )
    return (first - second).abs().sum(-1)


@share_arguments(AGGREGATION_ARGUMENTS)
def hybrid_distillation_loss(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    common: Tensor,
    tokens: Tensor,
    teacher_tokens: Tensor,
    later: Tensor | None = None,
    teacher_later: Tensor | None = None,
    divergence: Divergence | Callable[[Tensor, Tensor], Tensor] = "forward_kl",
    temperature: float = 1.0,
    teacher_weight: float = 0.5,
    unmatched_weight: float = 1.0,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Divergence from a teacher with another vocabulary ``W`` than the student's ``V``, at S spans of the same text.

    ``ℓ_s = D(Q_s, P_s) + u d(q, p)`` with the divergence D of :func:`distillation_loss` and the distance d of
    :func:`universal_logit_distance`; then :func:`aggregate`.

    A span is the shortest piece of a text at whose ends both have the end of a token. Student and teacher have seen the
    same text before it, so that their distributions at its **first** token say how this text goes on. The student's
    tokens ``y_1 ... y_n`` of the span have the probability ``P(span) = p(y_1) Π_{i>1} p(y_i)`` by the chain rule, which
    is part of that of ``y_1``: ``P(y_1) = p(y_1) (1 - Π_{i>1} p(y_i))`` is left for other texts that begin with it.
    With ``P(v) = p(v)`` for all other tokens this is a distribution: ``P(span) + Σ_v P(v) = 1``. Likewise ``Q`` of the
    teacher's tokens. If the span is one token for one side, a token of the other that writes the same text counts as
    the span, in however many tokens it was written there.

    ``D`` compares the span and the pairs of ``common``, ``d`` the tokens that only one side has. What D compares has
    less than all probability, so that ``forward_kl`` is ``Σ Q log(Q/P) - Q + P`` and ``reverse_kl`` ``Σ P log(P/Q) - P
    + Q``, which are 0 where both agree and more elsewhere; ``jsd`` is so as it is. With one vocabulary and the same
    tokens each span is a token, and the loss is :func:`distillation_loss`.

    Hybrid loss and aligned spans: GOLD (General Online Logit Distillation, Patiño et al., Hugging Face, 2025). There
    the whole distribution of one position is multiplied by the probabilities of the span's other tokens, so that it
    does not sum to 1, and the divergence has no linear terms and can be negative.

    Args:
        student: (B, S, V) logits or log-probs of the student at the first token of each span.
        teacher: (B, S, W) the same for the teacher, detached here.
        mask: (B, S), true at spans. Masked entries may hold anything.
        common: (C, 2) int64, ids of student and teacher that write the same text; each id once at most.
        tokens: (B, S) int64, the student's first token of each span.
        teacher_tokens: (B, S) int64, the teacher's.
        later: (B, S) log-probs of the student's other tokens of each span, at the same temperature, with gradient; 0:
            it has none. ``None``: no span has.
        teacher_later: (B, S) those of the teacher.
        divergence: See :func:`distillation_loss`; a function is given C + 1 log-probs, which may sum to less than 1.
        temperature: τ > 0 by which both logits are divided.
        teacher_weight: ``w`` of ``jsd`` in (0, 1).
        unmatched_weight: ``u`` ≥ 0, weight of the tokens that only one side has.

    Returns:
        The loss with metrics ``distillation/divergence`` (D, nats) and ``distillation/unmatched`` (d), per span.

    Raises:
        ValueError: If shapes differ or an argument is out of range.
    """
    if not unmatched_weight >= 0.0:
        raise ValueError(f"unmatched_weight must be at least 0, got {unmatched_weight}")
    matched, unmatched = hybrid_divergence(
        student,
        teacher,
        mask,
        common=common,
        tokens=tokens,
        teacher_tokens=teacher_tokens,
        later=later,
        teacher_later=teacher_later,
        divergence=divergence,
        temperature=temperature,
        teacher_weight=teacher_weight,
    )
    metrics = {
        "distillation/divergence": masked_mean(matched.detach(), mask),
        "distillation/unmatched": masked_mean(unmatched.detach(), mask),
    }
    losses = matched + unmatched_weight * unmatched
    return LossOutput(aggregate(losses, mask, aggregation, denominator, max_length=max_length), metrics)


def hybrid_divergence(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    common: Tensor,
    tokens: Tensor,
    teacher_tokens: Tensor,
    later: Tensor | None = None,
    teacher_later: Tensor | None = None,
    divergence: Divergence | Callable[[Tensor, Tensor], Tensor] = "forward_kl",
    temperature: float = 1.0,
    teacher_weight: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """The ``D`` and ``d`` of :func:`hybrid_distillation_loss`, which has the arguments: (B, S) each, 0 where masked."""
    check_same_shape(mask=mask, tokens=tokens, teacher_tokens=teacher_tokens)
    check_same_shape(mask=mask, later=later, teacher_later=teacher_later)
    if student.shape[:-1] != mask.shape or teacher.shape[:-1] != mask.shape:
        raise ValueError(
            "student and teacher must be (B, S, V) and (B, S, W) and mask (B, S), got "
            f"{tuple(student.shape)}, {tuple(teacher.shape)} and {tuple(mask.shape)}"
        )
    if common.dim() != 2 or common.shape[1] != 2:
        raise ValueError(f"common must be (C, 2), the ids of student and teacher, got {tuple(common.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    compare, keep = divergence_function(divergence, teacher_weight), mask.bool()
    ours = _Side.of(student, tokens, later, keep, temperature)
    with torch.no_grad():
        theirs = _Side.of(teacher, teacher_tokens, teacher_later, keep, temperature)
    sizes = student.shape[-1], teacher.shape[-1]
    of_teacher = common.new_full(sizes[:1], -1).scatter(0, common[:, 0], common[:, 1])
    of_student = common.new_full(sizes[1:], -1).scatter(0, common[:, 1], common[:, 0])
    first = ours.categories(common[:, 0], theirs.written_alone(of_student))
    second = theirs.categories(common[:, 1], ours.written_alone(of_teacher))
    matched = compare(first[0], second[0])
    if divergence in ("forward_kl", "reverse_kl"):
        difference = (first[0].exp() - second[0].exp()).sum(-1)
        matched = matched + (difference if divergence == "forward_kl" else -difference)
    return select(matched, keep), select(universal_logit_distance(first[1], second[1]), keep)


class _Side:
    """The distribution of student or teacher over the spans.

    Args:
        logprobs: (B, S, V), at the first token of each span.
        token: (B, S, 1) int64, that token.
        later: (B, S, 1) log-probs of the other tokens; 0: there are none.
    """

    def __init__(self, logprobs: Tensor, token: Tensor, later: Tensor) -> None:
        self.logprobs, self.token, self.later = logprobs, token, later

    @classmethod
    def of(cls, logits: Tensor, token: Tensor, later: Tensor | None, keep: Tensor, temperature: float) -> "_Side":
        """Make a side of logits (B, S, V) and numbers (B, S); those that are not kept may hold anything."""
        logprobs = (select(full_precision(logits), keep.unsqueeze(-1)) / temperature).log_softmax(-1)
        others = torch.zeros_like(logprobs[..., 0]) if later is None else select(full_precision(later), keep)
        return cls(logprobs.clamp(min=LOG_ZERO), select(token, keep).unsqueeze(-1), others.unsqueeze(-1))

    def written_alone(self, partners: Tensor) -> Tensor:
        """(B, S, 1) the other side's token that writes the span, where one token of this side does; -1: there is none.

        ``partners`` (V,) has the other side's token of the same text for each of this side's; -1: there is none.
        """
        return partners[self.token].masked_fill(self.later < 0.0, -1)

    def categories(self, common: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs (B, S, C + 1) of the common tokens and the span, and (B, S, V - C) of the other tokens.

        Args:
            common: (C,) int64, this side's common tokens.
            whole: (B, S, 1) int64, the token that counts as the span; -1: none.
        """
        chosen, several = self.logprobs.gather(-1, self.token), self.later < 0.0
        otherwise = chosen + torch.log(-torch.expm1(self.later.where(several, -1.0)))
        otherwise = otherwise.where(several, LOG_ZERO)
        moved = (whole >= 0) & (whole != self.token)
        whole = whole.where(moved, self.token)
        alone = self.logprobs.gather(-1, whole).where(moved, LOG_ZERO)
        span = torch.logaddexp(chosen + self.later, alone)
        # Where nothing is moved the first token is written twice, with a gradient once.
        changed = torch.cat([otherwise, otherwise.detach().where(~moved, LOG_ZERO)], -1)
        logprobs = self.logprobs.scatter(-1, torch.cat([self.token, whole], -1), changed)
        is_common = torch.zeros(logprobs.shape[-1], device=common.device, dtype=torch.int8).index_fill(0, common, 1)
        others = is_common.argsort(stable=True)[: logprobs.shape[-1] - len(common)]
        return torch.cat([logprobs[..., common], span], -1), logprobs[..., others]
