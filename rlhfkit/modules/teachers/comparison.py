"""``TextComparison``: student and teacher compared at spans of the same text, whole distributions at each.

Shapes: B sequences, T tokens of the student, M of them selected, S spans, V and W tokens in the vocabularies; m and s
are those of a chunk.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import moved
from rlhfkit.data.host_copies import host_copy
from rlhfkit.distributed import exchange_errors
from rlhfkit.losses import logits_logprobs
from rlhfkit.losses.distillation import Divergence
from rlhfkit.losses.hybrid_distillation import hybrid_divergence
from rlhfkit.mesh import forward_group_of
from rlhfkit.models import unwrap
from rlhfkit.models.distillation import LogitRows, teacher_logits
from rlhfkit.models.forward import TokenizedBatch
from rlhfkit.modules.teachers.text import TeacherText, TextRows
from rlhfkit.modules.teachers.token_texts import UNFINISHED, TokenTexts


def common_tokens(student: TokenTexts, teacher: TokenTexts, end: int | None) -> Tensor:
    """(C, 2) int64 on the CPU, ids of student and teacher that write the same text; each id once at most.

    Tokens with the same name come first: several may write the same text, or parts of a character, or nothing. Texts
    are compared as they follow others, so that a word with a space before it is the same in every kind of tokenizer.

    Args:
        student: Of the student.
        teacher: Of the teacher.
        end: The token that ends the teacher's answers, which is the student's end of sequence if it has none of that
            name; ``None``: there is none.
    """
    sides = [_token_keys(side) for side in (student, teacher)]
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for by_name in (True, False):
        known: dict[Any, int] = {}
        for token, name, text in sides[0]:
            if token not in pairs and (by_name or text):
                known.setdefault((name if by_name else "", text), token)
        for token, name, text in sides[1]:
            found = known.pop((name if by_name else "", text), None) if token not in taken else None
            if found is not None:
                pairs[found] = token
                taken.add(token)
    own_end = student.tokenizer.eos_token_id
    if end is not None and own_end is not None and end not in taken:
        pairs[own_end] = end
    # On the CPU: models are built where a strategy wants their weights.
    return torch.tensor(sorted(pairs.items()), dtype=torch.int64, device="cpu").view(-1, 2)


def _token_keys(texts: TokenTexts) -> list[tuple[int, str, str]]:
    """Id, name and text of each token, those with the shortest names first; no text for parts of characters."""
    vocabulary = sorted(texts.tokenizer.get_vocab().items(), key=lambda item: (len(item[0]), item[1]))
    written = [(token, name, texts.text_of(token)) for name, token in vocabulary]
    return [(token, name, "" if UNFINISHED in text else text) for token, name, text in written]


class SpanRows(NamedTuple):
    """The spans of a chunk of m tokens.

    Attributes:
        places: (s,) int64, index in the chunk of the student's first token of each span.
        slots: (m,) int64, the span of which each token is a further one; s: of none.
        several: (s,) bool, whether the span has further tokens.
        teacher: (s, W) logits of the teacher at its first token of each span.
        teacher_tokens: (s,) int64, these tokens.
        teacher_later: (s,) float32, log-probs of the teacher's further tokens; 0: it has none.
    """

    places: Tensor
    slots: Tensor
    several: Tensor
    teacher: Tensor
    teacher_tokens: Tensor
    teacher_later: Tensor


class ComparedSpans(NamedTuple):
    """The spans of a batch.

    Attributes:
        rows: The spans of a chunk.
        parts: The chunks of the M tokens, none of which divides a span; at least one.
        aligned: (B, T-1) bool, the student's tokens that are in spans.
    """

    rows: Callable[[slice], SpanRows]
    parts: list[slice]
    aligned: Tensor


@dataclass
class _HostBatch:
    """What is read of a batch, on the CPU."""

    input_ids: Tensor
    lengths: Tensor
    action_mask: Tensor


@dataclass
class _Tokens:
    """What the teacher reads."""

    input_ids: Tensor
    attention_mask: Tensor


class _SpanTokens:
    """Which of the tokens that a mask selects are in spans; on the CPU.

    Args:
        spans: (B, T-1) int, the span of each token within its sequence, -1: none.
        mask: (B, T-1) bool.
    """

    def __init__(self, spans: Tensor, mask: Tensor) -> None:
        rows = torch.arange(len(spans))[:, None] * (spans.shape[1] + 1)
        selected = (spans + rows).where(spans >= 0, -1)[mask].long()
        before = torch.cat([selected.new_full((1,), -1), selected[:-1]])
        inside = selected >= 0
        self.is_first = inside & (selected != before)
        self.first = self.is_first.nonzero()[:, 0]
        """(S,) int64, the first token of each span."""
        self.span = (self.is_first.cumsum(0) - 1).where(inside, -1)
        """(M,) int64, the span of each token; -1: none."""
        self.several = self.span[inside].bincount(minlength=len(self.first)) > 1
        """(S,) bool, whether it has more tokens."""

    def parts(self, chunk_size: int) -> list[slice]:
        """Chunks of at most ``chunk_size`` tokens, unless a span is longer, that end where spans do; at least one."""
        ends = [*(self.is_first | (self.span < 0)).nonzero()[:, 0].tolist(), len(self.span)]
        found, start = [], 0
        while start < len(self.span):
            place = bisect_right(ends, start + chunk_size) - 1
            end = ends[place] if ends[place] > start else ends[place + 1]
            found.append(slice(start, end))
            start = end
        return found or [slice(0, 0)]


class TextComparison:
    """Compares the distributions of a student with those of a teacher that reads text.

    Args:
        text: Reads sequences of the student with the teacher's tokenizer.
        divergence: Of :func:`~rlhfkit.losses.hybrid_distillation_loss`, as the others.
        teacher_weight: Of ``jsd``.
    """

    def __init__(self, text: TeacherText, divergence: Divergence | Any, teacher_weight: float) -> None:
        self.text = text
        self._divergence: Any = divergence
        self._teacher_weight = teacher_weight
        self._common = common_tokens(text.student, text.teacher, text.end)
        self._on_device: dict[tuple[Any, ...], Tensor] = {}

    def spans(
        self, model: nn.Module, batch: TokenizedBatch, mask: Tensor, *, temperature: float, chunk_size: int
    ) -> ComparedSpans:
        """Have the teacher read a batch, whose ``mask`` (B, T-1) selects M tokens. A collective.

        Raises:
            ValueError: On all ranks, if the teacher cannot read a sequence of one of them, or ranks compute forward
                passes together.
        """
        if forward_group_of(unwrap(model)) is not None:
            raise ValueError(
                "spans of a teacher that reads text cannot be divided among ranks that compute forward passes "
                "together: use a mesh without sequence and tensor ranks, or a teacher with the student's tokens"
            )
        read = self._read(batch, mask)
        ours = _SpanTokens(read.spans, _on_host(mask))
        chosen = read.teacher_spans >= 0
        theirs = _SpanTokens(read.teacher_spans, chosen)
        device = batch.input_ids.device
        tokens = _Tokens(moved(read.input_ids, device), moved(read.attention_mask, device))
        logits = teacher_logits(model, tokens, moved(chosen, device))
        wanted = moved(read.input_ids[:, 1:][chosen], device)
        later = self._later(logits, theirs, wanted, temperature, chunk_size)
        first, teacher_first = moved(ours.first, device), moved(theirs.first, device)
        span, is_first, several = (moved(side, device) for side in (ours.span, ours.is_first, ours.several))
        starts = ours.first.tolist()

        def rows(part: slice) -> SpanRows:
            these = slice(bisect_right(starts, part.start - 1), bisect_right(starts, part.stop - 1))
            count, at = these.stop - these.start, span[part]
            return SpanRows(
                first[these] - part.start,
                (at - these.start).masked_fill((at < 0) | is_first[part], count),
                several[these],
                logits(teacher_first[these])[0],
                wanted[teacher_first[these]],
                later[these],
            )

        return ComparedSpans(rows, ours.parts(chunk_size), moved(read.spans >= 0, device))

    def compare(self, student: Tensor, spans: SpanRows, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(s,) divergences and (s,) distances of unmatched tokens, from logits (m, V) at tokens (m,) of the student."""
        chosen = logits_logprobs(student, tokens, temperature=temperature).logprobs
        sums = chosen.new_zeros(len(spans.places) + 1).index_add(0, spans.slots, chosen)
        matched, unmatched = hybrid_divergence(
            student[spans.places][None],
            spans.teacher[None],
            torch.ones_like(spans.several)[None],
            common=self._common_of(student, spans.teacher),
            tokens=tokens[spans.places][None],
            teacher_tokens=spans.teacher_tokens[None],
            later=_of_several(sums[:-1], spans.several)[None],
            teacher_later=spans.teacher_later[None],
            divergence=self._divergence,
            temperature=temperature,
            teacher_weight=self._teacher_weight,
        )
        return matched[0], unmatched[0]

    def by_token(
        self, student: Tensor, spans: SpanRows, tokens: Tensor, temperature: float, unmatched_weight: float
    ) -> Tensor:
        """(m,) the loss of each span, see :meth:`compare`, at its first token, and 0 at all others."""
        matched, unmatched = self.compare(student, spans, tokens, temperature)
        found = matched + unmatched_weight * unmatched
        return found.new_zeros(len(tokens)).index_copy(0, spans.places, found)

    def _read(self, batch: TokenizedBatch, mask: Tensor) -> TextRows:
        """This rank's sequences as the teacher reads them; errors are raised on all ranks. A collective."""
        failure: ValueError | None = None
        try:
            lengths = _on_host(batch.attention_mask).sum(-1)  # known on the host, unlike sums on a device
            read = self.text.read(_HostBatch(_on_host(batch.input_ids), lengths, _on_host(mask)))
        except ValueError as error:
            failure = error
        raised = exchange_errors(failure, error_type=ValueError)
        if raised is not None:
            raise raised
        return read

    @torch.no_grad()
    def _later(
        self, logits: LogitRows, theirs: _SpanTokens, wanted: Tensor, temperature: float, chunk_size: int
    ) -> Tensor:
        """(S,) float32 log-probs of the teacher's further tokens of each span."""
        device = wanted.device
        index = (~theirs.is_first).nonzero()[:, 0]
        span, index = moved(theirs.span[index], device), moved(index, device)
        sums = torch.zeros(len(theirs.first), device=device)
        for start in range(0, len(index), chunk_size):
            part = index[start : start + chunk_size]
            found = logits_logprobs(logits(part)[0], wanted[part], temperature=temperature).logprobs
            sums.index_add_(0, span[start : start + chunk_size], found.float())
        return _of_several(sums, moved(theirs.several, device))

    def _common_of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The common tokens that both output layers have, on their device."""
        sizes = student.shape[-1], teacher.shape[-1]
        key = (student.device, *sizes)
        if key not in self._on_device:
            with torch.inference_mode(mode=False):  # made in validation, it is used in training
                known = (self._common < torch.tensor(sizes)).all(-1)
                self._on_device[key] = self._common[known].to(student.device)
        return self._on_device[key]


def _of_several(sums: Tensor, several: Tensor) -> Tensor:
    """Log-probs of further tokens: below 0 where there are some, 0 where there are none."""
    return sums.clamp(max=-torch.finfo(sums.dtype).eps).where(several, 0.0)


def _on_host(tensor: Tensor) -> Tensor:
    """A tensor on the CPU."""
    known = host_copy(tensor)
    return tensor.cpu() if known is None else known
