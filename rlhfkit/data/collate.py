"""From tokenised examples to the batches of supervised training.

Shapes: B sequences, T tokens (longest of the batch; the rest is padded on the right).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch, step_field


class StepTotals(NamedTuple):
    """The size of a whole optimizer step, over all micro-batches and ranks."""

    tokens: float
    """Tokens that are trained on."""
    sequences: float
    """Sequences with at least one such token."""
    micro_batches: int
    """Micro-batches times ranks whose losses are averaged."""


@dataclass(slots=True)
class TokenExample:
    """One tokenised sequence and which of its tokens are learned."""

    input_ids: list[int]
    """Token ids, at least one."""
    loss_mask: list[bool]
    """As long as ``input_ids``: true where the token is learned. The first never is: nothing predicts it."""

    def __post_init__(self) -> None:
        """Reject an example whose lists disagree."""
        if len(self.input_ids) != len(self.loss_mask) or not self.input_ids:
            raise ValueError(
                f"a TokenExample needs at least one token and a mask of the same length, got {len(self.input_ids)} "
                f"tokens and a mask of {len(self.loss_mask)}"
            )

    @property
    def targets(self) -> int:
        """Tokens that are learned."""
        return sum(self.loss_mask[1:])


@dataclass(kw_only=True)
class TokenBatch(PaddedBatch):
    """A batch for supervised training."""

    loss_mask: Tensor = step_field()
    """(B, T-1) bool on the next-token axis, true where token t+1 is learned."""

    @property
    def action_mask(self) -> Tensor:
        """``loss_mask``, under the name it has in :class:`~rlhfkit.data.Experience`."""
        return self.loss_mask

    def without_targets(self) -> Self:
        """The same sequences with nothing to learn: loss and gradient are exactly 0."""
        return dataclasses.replace(self, loss_mask=torch.zeros_like(self.loss_mask))


def collate_tokens(examples: Sequence[TokenExample], totals: StepTotals | None = None) -> TokenBatch:
    """Stack examples, padding on the right.

    Args:
        examples: At least one.
        totals: Size of the optimizer step they are a part of; ``None``: unknown, the batch normalises by itself.

    Returns:
        The batch.

    Raises:
        ValueError: If there is no example.
    """
    if not examples:
        raise ValueError("a TokenBatch needs at least one example, got none")
    length = max(len(example.input_ids) for example in examples)
    input_ids = torch.zeros(len(examples), length, dtype=torch.int64)
    attention_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    loss_mask = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, example in enumerate(examples):
        end = len(example.input_ids)
        input_ids[row, :end] = torch.tensor(example.input_ids)
        attention_mask[row, :end] = True
        loss_mask[row, :end] = torch.tensor(example.loss_mask)
    batch = TokenBatch(input_ids=input_ids, attention_mask=attention_mask, loss_mask=loss_mask[:, 1:])
    if totals is None:
        return batch
    return dataclasses.replace(
        batch,
        step_tokens=float(totals.tokens),
        step_sequences=float(totals.sequences),
        step_micro_batches=totals.micro_batches,
    )
