"""``UnpaddedRows``: the rows of a padded batch without their padding, to keep until they are trained on.

Padding gives every row of an iteration the memory of the longest one; with answers of different lengths, most of a
padded iteration is padding.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rlhfkit.data.batch import PaddedBatch

Batch = TypeVar("Batch", bound=PaddedBatch)

_INT32 = torch.iinfo(torch.int32)


class UnpaddedRows(Generic[Batch]):
    """The B rows of a batch; ``UnpaddedRows(batch).select(rows)`` equals ``batch.select(rows)``.

    Of each (B, T) and (B, T-1) tensor the values of real tokens are copied, int64 as int32 if they fit. In a selected
    batch they have their type again, and padding is the field's fill, whatever it was before.

    Raises:
        ValueError: If the batch has padding before or between real tokens.
    """

    def __init__(self, batch: Batch) -> None:
        self._lengths = batch.lengths
        if not torch.equal(batch.attention_mask, _real(self._lengths, batch.attention_mask.shape[1])):
            raise ValueError(
                "the attention mask of a batch must be true for real tokens, which come first in a row, and false for "
                "the padding after them; got a row with padding before or between real tokens"
            )
        self._columns: dict[str, _Column] = {}
        for name, (values, metadata) in batch.tensors().items():
            if metadata["axis"] != "row" and name != "attention_mask":
                shorter = int(metadata["axis"] == "step")
                sizes = (self._lengths - shorter).clamp(min=0)
                self._columns[name] = _Column(
                    _without_padding(values, sizes), sizes, shorter, metadata.get("fill", 0), values.dtype
                )
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
        tensors = {name: column.padded(index, longest) for name, column in self._columns.items()}
        chosen = self._rows.map_tensors(lambda tensor, _: tensor[index])
        return chosen.with_tensors({**tensors, "attention_mask": _real(lengths, longest)})

    def padded(self) -> Batch:
        """All rows, padded: the batch that these are the rows of."""
        return self.select(torch.arange(len(self)))


@dataclass(frozen=True)
class _Column:
    """The values of real tokens of one field."""

    values: Tensor
    sizes: Tensor
    """(B,) int64, values of each row."""
    shorter: int
    """1 on the next-token axis, else 0."""
    fill: float
    dtype: torch.dtype

    @cached_property
    def starts(self) -> Tensor:
        """(B,) int64, where each row begins in the values."""
        return self.sizes.cumsum(0) - self.sizes

    def padded(self, rows: Tensor, longest: int) -> Tensor:
        """Return (N, longest) or (N, longest, C) values, or one fewer on the next-token axis."""
        shape = len(rows), longest - self.shorter, *self.values.shape[1:]
        table = torch.full(shape, self.fill, dtype=self.dtype, device=self.values.device)
        for place, (start, size) in enumerate(zip(self.starts[rows].tolist(), self.sizes[rows].tolist(), strict=True)):
            table[place, :size] = self.values[start : start + size]
        return table


def _without_padding(padded: Tensor, sizes: Tensor) -> Tensor:
    """(sum of sizes,) or (sum of sizes, C) values of all rows in order, int64 as int32 if they fit."""
    # Row by row: an index would take several times the memory of the values.
    values = torch.cat([row[:size] for row, size in zip(padded, sizes.tolist(), strict=True)] or [padded.flatten(0, 1)])
    if values.dtype == torch.int64 and len(values):
        low, high = (int(bound) for bound in values.aminmax())
        if _INT32.min <= low and high <= _INT32.max:
            return values.int()
    return values


def _real(lengths: Tensor, longest: int) -> Tensor:
    """(B, longest) bool, true on the first ``lengths`` of each row."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]
