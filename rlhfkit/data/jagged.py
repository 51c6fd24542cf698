"""Rows of a batch without their padding: as they are kept until they are trained on, and sent from rank to rank.

Padding gives every row of an iteration the memory of the longest one; with answers of different lengths, most of a
padded iteration is padding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch

Batch = TypeVar("Batch", bound=PaddedBatch)


@dataclass(frozen=True)
class JaggedColumn:
    """What the rows of a batch have per token in one field."""

    rows: list[Tensor]
    """The values of each row, (T,) or (T - 1,), or with a second axis of several numbers; views of one tensor."""
    shorter: int
    """1 on the next-token axis, else 0."""
    fill: float
    """What padding is."""
    empty: Tensor
    """No values, of the type and the last axis that padded ones have."""

    @classmethod
    def of(cls, values: Tensor, metadata: Mapping[str, Any], lengths: Tensor) -> Self:
        """Copy the values of real tokens of a (B, T) or (B, T-1) field; token ids as int32, where they fit."""
        shorter = int(metadata["axis"] == "step")
        ends = (lengths - shorter).clamp(min=0).tolist()
        empty = values.new_empty(0, *values.shape[2:])
        # Row by row: an index would take several times the memory of the values.
        joined = torch.cat([row[:end] for row, end in zip(values, ends, strict=True)] or [empty])
        joined = joined if shorter else joined.int()
        return cls(list(torch.split(joined, ends)) if ends else [], shorter, metadata.get("fill", 0), empty)

    def padded(self, rows: Sequence[Tensor], longest: int) -> Tensor:
        """Return (N, longest) values of such rows, or one fewer on the next-token axis, and the last axis."""
        table = self.empty.new_full((len(rows), longest - self.shorter, *self.empty.shape[1:]), self.fill)
        for place, row in enumerate(rows):
            table[place, : len(row)] = row
        return table


class JaggedRows(Generic[Batch]):
    """The B rows of a batch; ``JaggedRows(batch).select(rows)`` equals ``batch.select(rows)``.

    In a selected batch padding is the field's fill, whatever it was before.

    Raises:
        ValueError: If the batch has padding before or between real tokens.
    """

    def __init__(self, batch: Batch) -> None:
        self._lengths = batch.lengths
        if not torch.equal(batch.attention_mask, real_tokens(self._lengths, batch.attention_mask.shape[1])):
            raise ValueError(
                "the attention mask of a batch must be true for real tokens, which come first in a row, and false for "
                "the padding after them; got a row with padding before or between real tokens"
            )
        self._columns = {
            name: JaggedColumn.of(values, metadata, self._lengths)
            for name, (values, metadata) in batch.tensors().items()
            if metadata["axis"] != "row" and name != "attention_mask"
        }
        # What is not per token; a batch's own methods leave out fields that are None.
        per_token = [entry for entry in dataclasses.fields(batch) if entry.metadata.get("axis") in ("token", "step")]
        missing: dict[str, Any] = {each.name: {} if each.metadata.get("by_name") else None for each in per_token}
        self._rows = dataclasses.replace(batch, **missing)

    def __len__(self) -> int:
        """Number of rows B."""
        return len(self._lengths)

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """Select rows by their (N,) indices, in the given order, padded to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self._lengths.device)
        lengths = self._lengths[index]
        longest = max(int(lengths.max()), 1) if len(index) else 1
        tensors = {
            name: column.padded([column.rows[row] for row in index.tolist()], longest)
            for name, column in self._columns.items()
        }
        chosen = self._rows.with_rows(index)
        return chosen.with_tensors({**tensors, "attention_mask": real_tokens(lengths, longest)})

    def padded(self) -> Batch:
        """All rows, padded: the batch that these are the rows of."""
        return self.select(range(len(self)))


def real_tokens(lengths: Tensor, longest: int) -> Tensor:
    """(B, longest) bool, true on the first ``lengths`` of each row."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
