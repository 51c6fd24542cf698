"""Answers whose reasoning steps are judged one by one, for process reward models.

A step is judged at its last token, which ``loss_mask`` marks, as TRL and OpenRLHF do.

Shapes: B sequences, T tokens (longest of the batch; the rest is padded on the right).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfkit.data.batch import StepTotals, TokenBatch, TokenExample, collate_tokens, on_both, step_field


@dataclass(slots=True)
class StepwiseExample:
    """A prompt with an answer in steps."""

    answer: TokenExample
    """Prompt and answer; ``loss_mask`` is true on the last token of each step."""
    labels: Sequence[float]
    """For each step, the probability that it is good: 1 and 0 are hard labels, values between are soft ones."""

    def __post_init__(self) -> None:
        """Check that there is one label in [0, 1] for each step."""
        if len(self.labels) != self.answer.targets:
            raise ValueError(
                f"a StepwiseExample needs a label for each step, got {self.answer.targets} steps and "
                f"{len(self.labels)} labels"
            )
        wrong = [label for label in self.labels if not 0.0 <= label <= 1.0]
        if wrong:
            raise ValueError(f"the label of a step must be in [0, 1], got {wrong[0]}")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.answer.num_tokens

    @property
    def targets(self) -> int:
        """Number of steps."""
        return self.answer.targets


@dataclass(kw_only=True)
class StepwiseBatch(TokenBatch):
    """Answers in steps; ``step_tokens`` counts the reasoning steps of the optimizer step."""

    labels: Tensor = step_field()
    """(B, T-1) float32 on the next-token axis: label of the step that ends at token t+1; 0 where none ends."""

    @property
    def step_ends(self) -> Tensor:
        """(B, T) bool, true on the last token of each step."""
        return on_both(lambda mask: torch.nn.functional.pad(mask, (1, 0)), self.loss_mask)


def collate_stepwise(examples: Sequence[StepwiseExample], totals: StepTotals | None = None) -> StepwiseBatch:
    """Stack answers, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    answers = collate_tokens([example.answer for example in examples], totals)
    labels = torch.zeros(answers.loss_mask.shape, dtype=torch.float32)
    labels[answers.loss_mask] = torch.tensor([label for example in examples for label in example.labels])
    return StepwiseBatch(**answers.state_dict(), labels=labels)
