"""Preference pairs: two answers to one prompt, of which one is preferred.

A batch of B pairs has 2B rows: the chosen answer of pair i, with its prompt, is row 2i and the rejected one row 2i + 1.
A packed forward pass (:func:`rlhfkit.models.policy_output`) computes a prefix that neighbours share, the prompt, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.batch import StepTotals, TokenBatch, TokenExample, collate_tokens, row_field

T = TypeVar("T")


@dataclass(slots=True)
class PreferenceExample:
    """Two tokenised answers to one prompt; ``ExampleTable(answers, PreferenceExample, each=2)`` has many."""

    chosen: TokenExample
    """Prompt and preferred answer; the tokens of the answer are selected."""
    rejected: TokenExample
    """The same prompt and the other answer."""
    margin: float | None = None
    """By how much the chosen answer is better, if known."""
    ref_logprobs: Sequence[float] | None = None
    """Summed log-probs of the chosen and of the rejected answer under the reference model, if computed already."""

    @property
    def num_tokens(self) -> int:
        """Tokens of both answers."""
        return self.chosen.num_tokens + self.rejected.num_tokens

    @property
    def targets(self) -> int:
        """Tokens of the chosen answer."""
        return self.chosen.targets

    @classmethod
    def from_token_ids(
        cls, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int], *, margin: float | None = None
    ) -> Self:
        """Make a pair from token ids.

        Args:
            prompt: Token ids of the prompt, at least one.
            chosen: Token ids of the preferred answer, end-of-sequence token included.
            rejected: The same for the other answer.
            margin: By how much the chosen answer is better.
        """

        def answered(answer: Sequence[int]) -> TokenExample:
            return TokenExample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))

        return cls(answered(chosen), answered(rejected), margin)


@dataclass(kw_only=True)
class PreferenceBatch(TokenBatch):
    """B pairs in 2B rows, chosen and rejected in turn; ``loss_mask`` selects the tokens of the answers.

    For pair losses ``step_sequences`` counts pairs and ``step_tokens`` tokens of chosen answers.
    """

    margins: Tensor | None = row_field(None)
    """(2B,) float32, by how much the chosen answer is better: the same number on both rows of a pair."""
    ref_logprobs: Tensor | None = row_field(None)
    """(2B,) float32, summed log-probs of the answers under the reference model."""

    def __post_init__(self) -> None:
        """Check that the rows make whole pairs."""
        if len(self) % 2:
            raise ValueError(f"a PreferenceBatch holds pairs, two rows each, got {len(self)} rows")

    @property
    def pairs(self) -> int:
        """Number of pairs B."""
        return len(self) // 2

    @staticmethod
    def chosen(values: Tensor) -> Tensor:
        """Rows of the chosen answers: (2B, ...) to (B, ...)."""
        return values[0::2]

    @staticmethod
    def rejected(values: Tensor) -> Tensor:
        """Rows of the rejected answers: (2B, ...) to (B, ...)."""
        return values[1::2]

    @property
    def pair_mask(self) -> Tensor:
        """(B,) bool, pairs of which both answers have a selected token."""
        answered = self.loss_mask.any(-1)
        return self.chosen(answered) & self.rejected(answered)

    @property
    def pair_denominator(self) -> float | None:
        """Denominator of an exact mean over the pairs of the step, see :attr:`sequence_denominator`."""
        return self.sequence_denominator

    @property
    def mean_chosen_length(self) -> float | None:
        """Mean tokens of a chosen answer over the optimizer step; ``None``: its size is not known."""
        if self.step_tokens is None or self.step_sequences is None:
            return None
        return max(self.step_tokens, 1.0) / max(self.step_sequences, 1.0)


def collate_preferences(examples: Sequence[PreferenceExample], totals: StepTotals | None = None) -> PreferenceBatch:
    """Stack pairs, padding on the right.

    Args:
        examples: At least one.
        totals: Pairs and tokens of chosen answers of their step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no pair, or only some have a margin or reference log-probs.
    """
    rows = [answer for example in examples for answer in (example.chosen, example.rejected)]
    margins = _all_or_none("margin", [example.margin for example in examples])
    reference = _all_or_none("ref_logprobs", [example.ref_logprobs for example in examples])
    return PreferenceBatch(
        **vars(collate_tokens(rows, totals)),
        margins=None if margins is None else torch.tensor(margins, dtype=torch.float32).repeat_interleave(2),
        ref_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float32).flatten(),
    )


def _all_or_none(name: str, values: list[T | None]) -> list[T] | None:
    given = [value for value in values if value is not None]
    if given and len(given) < len(values):
        raise ValueError(f"{name} is set in {len(given)} of {len(values)} pairs of a batch: set it in all or in none")
    return given or None
