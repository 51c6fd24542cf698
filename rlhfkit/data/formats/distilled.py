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
from rlhfkit.data.loaders.steps import TokenizedDataset


@dataclass(slots=True)
class DistilledExample:
    """A tokenised sequence and the teacher's likeliest tokens at each trained one."""

    tokens: TokenExample
    """The sequence."""
    logprobs: Tensor
    """(targets, K) float32."""
    ids: Tensor
    """(targets, K) int32."""


class DistilledExamples:
    """Examples of a data set and the teacher's likeliest tokens: 8 K bytes per trained token."""

    def __init__(self, examples: TokenizedDataset, logprobs: Tensor, ids: Tensor) -> None:
        """Combine N examples with the teacher's log-probs and token ids, (all targets, K) each, example after example.

        Raises:
            ValueError: If the numbers of tokens differ.
        """
        if sum(examples.targets) != len(logprobs) or logprobs.shape != ids.shape:
            raise ValueError(
                f"the examples have {sum(examples.targets)} trained tokens, the teacher's log-probs are of "
                f"{tuple(logprobs.shape)} and its tokens of {tuple(ids.shape)}"
            )
        self.examples = examples
        self.lengths = examples.lengths
        self.targets = examples.targets
        self._ends = list(accumulate(examples.targets))
        self._logprobs, self._ids = logprobs, ids

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> DistilledExample:
        """One example."""
        part = slice(self._ends[index] - self.targets[index], self._ends[index])
        return DistilledExample(self.examples[index], self._logprobs[part], self._ids[part])


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
