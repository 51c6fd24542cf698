"""Supervised examples with the teacher's likeliest tokens at their trained tokens.

Shapes: B sequences, T tokens, M trained tokens of the batch in row-major order, K likeliest tokens of the teacher.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from rlhfkit.data.batch import StepTotals, TokenBatch, TokenExample, collate_tokens, moved
from rlhfkit.data.loaders.steps import ExampleTable, TokenizedDataset


@dataclass(slots=True)
class DistilledExample:
    """A tokenised sequence and the teacher's likeliest tokens at each trained one: 8 K bytes per trained token."""

    tokens: TokenExample
    """The sequence."""
    logprobs: Tensor
    """(targets, K) float32."""
    ids: Tensor
    """(targets, K) int32."""


class ValuesOfTargets:
    """Values of the trained tokens of each example, out of those of all examples."""

    def __init__(self, values: Tensor, targets: Sequence[int]) -> None:
        """Divide (all targets, K) values among examples with these numbers of trained tokens.

        Raises:
            ValueError: If the numbers of tokens differ.
        """
        if sum(targets) != len(values):
            raise ValueError(f"the examples have {sum(targets)} trained tokens, and there are {len(values)} values")
        self._values = values
        self._ends = [0, *accumulate(targets)]

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        """(targets, K) values of one example."""
        return self._values[self._ends[index] : self._ends[index + 1]]


def distilled_examples(examples: TokenizedDataset, logprobs: Tensor, ids: Tensor) -> ExampleTable[DistilledExample]:
    """Combine examples with the teacher's log-probs and token ids, (all targets, K) each, example after example.

    Raises:
        ValueError: If the numbers of tokens differ.
    """
    of_targets = [ValuesOfTargets(values, examples.targets) for values in (logprobs, ids)]
    return ExampleTable(examples, DistilledExample, logprobs=of_targets[0], ids=of_targets[1])


@dataclass(kw_only=True)
class DistilledBatch(TokenBatch):
    """A batch for supervised training with the teacher's likeliest tokens."""

    teacher_logprobs: Tensor
    """(M, K) float32."""
    teacher_ids: Tensor
    """(M, K) int64."""

    def to(self, device: torch.device | str, **kwargs: Any) -> Self:
        """Move every tensor; see :meth:`PaddedBatch.to`."""
        names = ("teacher_logprobs", "teacher_ids")
        teacher: dict[str, Any] = {name: moved(getattr(self, name), device, **kwargs) for name in names}
        return dataclasses.replace(super().to(device, **kwargs), **teacher)

    def without_targets(self) -> Self:
        """The same sequences without trained tokens: loss and gradient are exactly 0."""
        return dataclasses.replace(
            super().without_targets(), teacher_logprobs=self.teacher_logprobs[:0], teacher_ids=self.teacher_ids[:0]
        )


def collate_distilled(examples: Sequence[DistilledExample], totals: StepTotals | None = None) -> DistilledBatch:
    """Stack examples, padding on the right.

    Args:
        examples: At least one.
        totals: Size of their optimizer step; ``None``: unknown, the batch normalises by itself.

    Raises:
        ValueError: If there is no example.
    """
    tokens = collate_tokens([example.tokens for example in examples], totals)
    return DistilledBatch(
        **tokens.state_dict(),
        teacher_logprobs=torch.cat([example.logprobs for example in examples]),
        teacher_ids=torch.cat([example.ids for example in examples]).long(),
    )
