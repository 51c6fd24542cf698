"""``IterationSummary``: the numbers of each sequence that all ranks know, while one rank has its tokens."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor


@dataclass(kw_only=True, eq=False)
class IterationSummary:
    """N sequences, of all ranks, in the order in which their prompts were drawn; the same on every rank.

    Row n of the iteration is row n here; :attr:`~rlhfkit.data.Experience.rows` has the n of a rank's own rows.

    Attributes:
        rewards: (N,) float32, NaN where the sample could not be scored.
        group: (N,) int64, equal for samples of one prompt.
        sample_index: (N,) int64, position in the group.
        truncated: (N,) bool, true when generation stopped at the length limit.
        lengths: (N,) int64, tokens of prompt and completion.
        prompt_lengths: (N,) int64, tokens before the first that is trained on; 0 where none is.
        trained_tokens: (N,) int64, tokens in the action mask.
        oldest_version: (N,) int64, smallest policy version of a trained token; -1 where there is none.
        newest_version: (N,) int64, largest policy version of a trained token; -1 where there is none.
        update: (N,) int64, the optimizer update of this iteration that trains on the row.
        replayed: (N,) bool, true where the sample was made for an earlier iteration.
        reward_parts: (N,) float32 each.
    """

    rewards: Tensor
    group: Tensor
    sample_index: Tensor
    truncated: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    trained_tokens: Tensor
    oldest_version: Tensor
    newest_version: Tensor
    update: Tensor
    replayed: Tensor
    reward_parts: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of sequences N."""
        return len(self.group)

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Select rows by their indices, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        columns = {name: value[index] for name, value in self.columns().items()}
        parts = {name: value[index] for name, value in self.reward_parts.items()}
        return type(self)(**columns, reward_parts=parts)

    def columns(self) -> dict[str, Tensor]:
        """Return all columns but the parts of the reward, by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "reward_parts"}
