"""``PackedLayout``: where the sequences of a packed row begin and end, and the indices that attention needs of them.

The host knows the lengths of batches that it has copied to the device; those of others are read with one wait for the
device (:func:`read_rows`). All indices are computed on the CPU and sent from pinned memory, which nothing waits for
(:func:`send_together`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhfkit.data.batch import host_copy

CPU = torch.device("cpu")
"""Named where tensors are made, as the default device may be another."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length: indices of their tokens in the packed row."""

    gather: Tensor
    """(S, L) int64, index into the packed row for each of S sequences padded to L.

    Padding points at tokens of the same sequence in turn: at one token for all, the backward pass on CUDA would add up
    thousands of zeros one after another.
    """
    real: Tensor
    """Positions of ``gather.flatten()`` whose results are kept: neither padding nor a prefix of another row."""
    longest: int
    """L, tokens."""


@dataclass(frozen=True)
class CumulativeLengths:
    """The sequences of a packed row as kernels for sequences of different lengths take them.

    Queries are each sequence's own tokens, in the order of the row; keys are the whole sequence with its shared prefix.
    So the last query of a sequence belongs to its last key ("bottom-right" causal masks, those of flash-attn from 2.1).
    """

    queries: Tensor
    """(S + 1,) int32, where each sequence's queries begin in the row, and N."""
    keys: Tensor
    """(S + 1,) int32, where each sequence's keys begin among the gathered ones, and their number."""
    gather: Tensor | None
    """Index into the row of each key; ``None``: no prefix is shared, the keys are the row."""
    longest_query: int
    """Tokens."""
    longest_key: int
    """Tokens."""


class AttentionOptions(NamedTuple):
    """How a layer weighs the keys that a query sees."""

    scaling: float | None = None
    """Factor of the scores; ``None``: 1/sqrt(D)."""
    dropout: float = 0.0
    """Probability with which a weight is dropped."""
    window: int | None = None
    """Keys that a query sees, its own included; ``None``: all up to its own."""


WholeAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one rank over a whole row: (N, heads, D) from queries (heads, N, D), keys and values."""

SharedAttention = Callable[[Tensor, Tensor, Tensor, "PackedLayout", WholeAttention, AttentionOptions], Tensor]
"""Attention over a packed row whose tokens lie on several ranks: (n, heads, D) from queries (heads, n, D).

Keys and values are those of the same n tokens, with key heads. The layout is that of the whole row of N tokens, the
``WholeAttention`` one rank's over it. All ranks of a sequence group call it together.
"""


@dataclass(frozen=True)
class PackedLayout:
    """The division of a packed row of N tokens into sequences, built once per forward pass.

    A prefix that neighbours share (the prompt of a preference pair or group) is in the row once; attention reads its
    keys and values for every sequence that has it.
    """

    lengths: tuple[int, ...]
    """Tokens of each of the B sequences."""
    prefixes: tuple[int, ...]
    """Leading tokens that each sequence shares with the one before it."""
    places: Tensor
    """(B, T) int64 on the CPU, index of each token of each sequence in the packed row; 0 for padding."""
    tokens: Tensor
    """(N,) int64, index of each token of the row in the flattened (B, T) batch."""
    position_ids: Tensor
    """(1, N) int64, from 0 in every sequence."""
    readers: set[int] = field(default_factory=set, compare=False)
    """The ``id`` of each attention layer that has used the layout; empty after a forward pass if none did."""
    shared: SharedAttention | None = field(default=None, compare=False)
    """How attention sees all tokens where this rank computes only some of the row; ``None``: it computes all."""
    routing: Any = field(default=None, compare=False)
    """What the routers of a mixture are told, a :class:`~rlhfkit.models.routing.Routing`; ``None``: nothing."""

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        shared: Sequence[int] | None = None,
        width: int | None = None,
    ) -> "PackedLayout":
        """Plan sequences of ``lengths`` (each at least 1), packed in this order.

        ``shared``: leading tokens that each sequence shares with the one before it; 0 when ``None``. ``width``: T, the
        longest length when ``None``.
        """
        prefixes = (0,) * len(lengths) if shared is None else tuple(shared)
        sizes, kept_from = torch.tensor(lengths, device=CPU), torch.tensor(prefixes, device=CPU)
        steps = torch.arange(width or int(sizes.max()), device=CPU)
        own = (steps < sizes[:, None]) & (steps >= kept_from[:, None])
        places = torch.zeros(own.shape, dtype=torch.int64, device=CPU)
        places[own] = torch.arange(int(own.sum()), device=CPU)
        for row in kept_from.nonzero()[:, 0].tolist():
            places[row, : kept_from[row]] = places[row - 1, : kept_from[row]]
        tokens, positions = send_together([own.flatten().nonzero()[:, 0], steps.expand_as(own)[own][None]], device)
        return cls(tuple(lengths), prefixes, places, tokens, positions)

    @property
    def counts(self) -> list[int]:
        """Tokens of each sequence that are in the row for it alone; their sum is N."""
        return [length - prefix for length, prefix in zip(self.lengths, self.prefixes, strict=True)]

    @cached_property
    def rows(self) -> list[int]:
        """The sequences that have tokens of their own; another row contains all others."""
        return [row for row, length in enumerate(self.lengths) if self.prefixes[row] < length]

    @cached_property
    def cumulative(self) -> CumulativeLengths:
        """The arguments of kernels for sequences of different lengths."""
        keys = [self.lengths[row] for row in self.rows]
        queries = [self.lengths[row] - self.prefixes[row] for row in self.rows]
        sums = [torch.tensor([0, *counts], device=CPU).cumsum(0) for counts in (queries, keys)]
        if any(self.prefixes):
            sums.append(torch.cat([self.places[row, : self.lengths[row]] for row in self.rows]))
        sent = send_together(sums, self.tokens.device)
        gather = sent[2] if len(sent) > 2 else None
        return CumulativeLengths(sent[0].int(), sent[1].int(), gather, max(queries), max(keys))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Sequences grouped by the next power of two of their length, padded less than twofold within a group."""
        return self._buckets[0]

    @property
    def order(self) -> Tensor:
        """(N,) int64, undoes the order of the tokens in the concatenated results of the buckets."""
        return self._buckets[1]

    @cached_property
    def _buckets(self) -> tuple[tuple[Bucket, ...], Tensor]:
        members: dict[int, list[int]] = defaultdict(list)
        for row in self.rows:
            members[(self.lengths[row] - 1).bit_length()].append(row)
        parts: list[Tensor] = []
        returned: list[Tensor] = []
        for _, rows in sorted(members.items()):
            sizes = torch.tensor([self.lengths[row] for row in rows], device=CPU)[:, None]
            steps = torch.arange(int(sizes.max()), device=CPU)
            gather = self.places[rows].gather(1, steps % sizes)
            prefixes = torch.tensor([self.prefixes[row] for row in rows], device=CPU)[:, None]
            kept = (steps < sizes) & (steps >= prefixes)
            returned.append(gather[kept])
            parts += [gather, kept.flatten().nonzero()[:, 0]]
        packed = torch.cat(returned)
        order = torch.empty_like(packed)
        order[packed] = torch.arange(len(packed), device=CPU)
        *sent, order = send_together([*parts, order], self.tokens.device)
        pairs = zip(sent[::2], sent[1::2], strict=True)
        return tuple(Bucket(gather, real, gather.shape[1]) for gather, real in pairs), order


def row_lengths(input_ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) int64 tokens of each row of a batch (B, T), padded on the right, and of them those of the row before."""
    same = (input_ids[1:] == input_ids[:-1]) & real[1:] & real[:-1]
    return real.sum(-1), pad(same.cumprod(-1).sum(-1), (1, 0))


def read_rows(input_ids: Tensor, real: Tensor, wanted: Tensor) -> list[Tensor]:
    """:func:`row_lengths` and ``wanted`` on the CPU; waits for the device unless the host knows the batch."""
    ids, mask, chosen = (host_copy(tensor) for tensor in (input_ids, real, wanted))
    if ids is None or mask is None or chosen is None:
        return read_together(*row_lengths(input_ids, real), wanted)
    return [*row_lengths(ids, mask), chosen]


def on_cpu(tensor: Tensor) -> Tensor:
    """A tensor of a batch on the CPU; waits for the device unless the host knows it."""
    known = host_copy(tensor)
    return tensor.cpu() if known is None else known


def read_together(*tensors: Tensor) -> list[Tensor]:
    """Copy integer or bool tensors of one device, with numbers below 2^31, to the CPU; waits for the device once."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    joined = torch.cat([tensor.flatten().int() for tensor in tensors]).cpu()
    parts = torch.split(joined, [tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def send_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy int64 tensors from the CPU to a device in one transfer, without waiting for it."""
    if device.type == "cpu":
        return list(tensors)
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":
        joined = joined.pin_memory()  # from pageable memory a copy is waited for
    parts = torch.split(joined.to(device, non_blocking=True), [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
