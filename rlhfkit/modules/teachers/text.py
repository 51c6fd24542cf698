"""``TeacherText``: a teacher with tokens of its own reads the student's samples as text.

Both write the same text with different tokens, so they are compared at *spans*: the shortest pieces of the text at
whose ends both have the end of a token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses.distillation import last_of_span
from rlhfkit.modules.teachers.prompts import TeacherPrompts
from rlhfkit.modules.teachers.token_texts import UNFINISHED, Span, TokenTexts, aligned_spans


class ReadBatch(Protocol):
    """The fields of a batch that are read; ``Experience`` and ``TokenBatch`` have them."""

    input_ids: Tensor

    @property
    def lengths(self) -> Tensor:
        """(B,) real tokens of each sequence."""
        ...

    @property
    def action_mask(self) -> Tensor:
        """(B, T-1) bool on the next-token axis, true where the policy has chosen, or learns, a token."""
        ...


class TextRows(NamedTuple):
    """B sequences of the student in the tokens of the teacher, T' at most; on the CPU.

    Attributes:
        input_ids: (B, T') int64, padded with 0 on the right.
        attention_mask: (B, T') bool, true on real tokens.
        spans: (B, T-1) int32, the span that each of the student's tokens is in; -1: none.
        teacher_spans: (B, T'-1) int32, that of each of the teacher's.
    """

    input_ids: Tensor
    attention_mask: Tensor
    spans: Tensor
    teacher_spans: Tensor


class Rewritten(NamedTuple):
    """Samples in the tokens of the teacher.

    Attributes:
        experience: B sequences of T' teacher's tokens, in the order of the samples.
        spans: See :class:`TextRows`.
        teacher_spans: Likewise.
    """

    experience: Experience
    spans: Tensor
    teacher_spans: Tensor

    def to_student(self, logprobs: Tensor) -> Tensor:
        """(B, T-1) log-probs of spans, at the last token of each, from those of the teacher's tokens (B, T'-1)."""
        count = int(max(self.spans.max(), self.teacher_spans.max())) + 1 if self.spans.numel() else 0
        sums = torch.zeros(len(self.spans), count + 1).scatter_add_(1, self.teacher_spans.long() + 1, logprobs.float())
        return sums.gather(1, self.spans.long() + 1).where(last_of_span(self.spans), 0.0)


class TeacherText:
    """Writes samples of the student as text, and reads them with the tokenizer of the teacher.

    What the policy did not choose (the prompt, and the output of tools) is read by itself, so that answers begin and
    end at the same places. A control token at the end of an answer is the token that ends the teacher's: its end of
    sequence, or that of a turn in its chat template unless it reads plain text. Other control tokens write nothing and
    are not compared, nor is a character of which an answer that was cut has only a part.

    Args:
        reads: What is done to the prompt: see :class:`~rlhfkit.modules.teachers.prompts.TeacherPrompts`.
        student: The student's tokenizer.
        teacher: The teacher's tokenizer.
        longest: Tokens that the teacher can read; ``None``: no limit.
        distributions: Whole distributions are compared, not log-probs of texts: leave out the first span of answers
            that the teacher's tokenizer begins with a space of its own, since its likely tokens begin with it too.
    """

    def __init__(
        self, reads: str, student: Any, teacher: Any, longest: int | None = None, *, distributions: bool = False
    ) -> None:
        self._longest = longest
        self._distributions = distributions
        self.student, self.teacher = TokenTexts(student), TokenTexts(teacher)
        self._prompts = TeacherPrompts(reads, self.student, self.teacher)
        self.end = self._prompts.end_of_answer()
        """The token that ends the teacher's answers; ``None``: it has none."""

    def rewrite(self, experience: Experience) -> Rewritten:
        """Write B samples in the teacher's tokens, and align them.

        Raises:
            ValueError: If a sample is longer than the teacher's context, or its prompt cannot be read.
        """
        rows = self.read(experience)
        chosen = rows.teacher_spans >= 0
        read = dataclasses.replace(
            _without_numbers(experience),
            input_ids=rows.input_ids,
            attention_mask=rows.attention_mask,
            action_mask=chosen,
            rollout_logprobs=torch.zeros(chosen.shape),
            versions=torch.zeros_like(chosen, dtype=torch.int64),
            iteration=None,
        )
        return Rewritten(read, rows.spans, rows.teacher_spans)

    def read(self, batch: ReadBatch) -> TextRows:
        """Write B sequences in the teacher's tokens, and align them.

        Raises:
            ValueError: If one is longer than the teacher's context, or its prompt cannot be read.
        """
        columns = batch.input_ids.tolist(), batch.lengths.tolist(), batch.action_mask.tolist()
        rows = [self._row(ids[:length], mask) for ids, length, mask in zip(*columns, strict=True)]
        longest = max([2, *(len(ids) for ids, _, _ in rows)])
        if self._longest is not None and longest > self._longest:
            raise ValueError(
                f"a sequence has {longest} tokens of the teacher, whose context is {self._longest}: lower "
                "SamplingSpec(max_new_tokens=...) or SFTDataModule(max_length=...), or take a teacher with a longer "
                "context"
            )
        return TextRows(
            _padded([ids for ids, _, _ in rows], longest, 0),
            torch.arange(longest) < torch.tensor([len(ids) for ids, _, _ in rows])[:, None],
            _padded([spans for _, spans, _ in rows], batch.action_mask.shape[1], -1).int(),
            _padded([spans for _, _, spans in rows], longest - 1, -1).int(),
        )

    def _row(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[int], list[int]]:
        """The teacher's tokens of a sample; the span of each token but the first, of the student and the teacher."""
        chosen = [False, *mask[: len(ids) - 1]]
        if not any(chosen):  # a row that only takes part in a forward pass of others
            return [0, 0], [-1] * (len(ids) - 1), [-1]
        read: list[int] = []
        ours, theirs = [-1] * len(ids), list[int]()
        count = start = 0
        while start < len(ids):
            end = next((place for place in range(start, len(ids)) if chosen[place] != chosen[start]), len(ids))
            spans: list[Span] = []
            if chosen[start]:
                tokens, spans = self._answer(ids[start:end])
            else:
                ended = start > 0 and ids[start - 1] in self.student.controls and self.end is not None
                tokens = (
                    self._prompts.following(ids[start:end], ended=ended) if start else self._prompts.tokens(ids[:end])
                )
            theirs += [-1] * len(tokens)
            if not read and spans and spans[0].second.start == 0:
                spans = spans[1:]  # nothing predicts the first token of all, of tokenizers without any control token
            for number, span in enumerate(spans, count):
                for place in span.first:
                    ours[start + place] = number
                for place in span.second:
                    theirs[len(read) + place] = number
            count += len(spans)
            read += tokens
            start = end
        return read, ours[1:], theirs[1:]

    def _answer(self, ids: list[int]) -> tuple[list[int], list[Span]]:
        """The teacher's tokens of an answer, and what of it both write."""
        controls = self.student.controls
        ended = ids[-1] in controls and self.end is not None
        written = ids[:-1] if ended else ids
        sizes, texts = self.student.pieces(written)
        if not ended and texts and texts[-1].endswith(UNFINISHED):
            sizes, texts = sizes[:-1], texts[:-1]
        text = "".join(texts)
        tokens = list(self.teacher.tokenizer(text, add_special_tokens=False)["input_ids"])
        teacher_sizes, teacher_texts = self.teacher.pieces(tokens)
        spaced = "".join(teacher_texts) == " " + text  # SentencePiece puts a space before every text
        if spaced:
            teacher_texts[0] = teacher_texts[0].removeprefix(" ")
        places, teacher_places = _starts(sizes), _starts(teacher_sizes)
        spans = []
        for span in aligned_spans(texts, teacher_texts):
            start, stop = places[span.first.start], places[span.first.stop]
            while start < stop and ids[start] in controls:
                start += 1
            comparable = not (spaced and self._distributions and span.second.start == 0)
            if comparable and start < stop and controls.isdisjoint(ids[start:stop]):
                theirs = range(teacher_places[span.second.start], teacher_places[span.second.stop])
                spans.append(Span(range(start, stop), theirs))
        if ended:
            spans.append(Span(range(len(ids) - 1, len(ids)), range(len(tokens), len(tokens) + 1)))
            tokens.append(cast(int, self.end))
        return tokens, spans


def _without_numbers(experience: Experience) -> Experience:
    """Leave out what has a number for each of the student's tokens."""
    numbers: dict[str, Any] = {
        field.name: None
        for field in dataclasses.fields(Experience)
        if field.metadata.get("axis") == "step" and field.default is None
    }
    return dataclasses.replace(experience, **numbers, columns={})


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each piece begins, and the end of the last."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> Tensor:
    """(B, length) int64 of rows that are not longer."""
    found = torch.full((len(rows), length), fill, dtype=torch.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return found
