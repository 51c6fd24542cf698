"""``RingPlan``: which tiles of a packed row a rank computes when keys and values go around a ring of ranks.

A token i of a packed row sees a token j if j belongs to i's sequence, or to a prefix that it shares, and is neither
later nor outside the window. With the first and the last sequence that has each token ("shared prefixes" are shared by
neighbours) this is a comparison of numbers per token, so a mask is made for one tile at a time and never for the row.
All is planned on the CPU, once per forward pass and window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rlhfkit.models.attention.layout import CPU, PackedLayout, send_together

UNLIMITED = 2**62
"""The window of attention without one, tokens."""

SMALLEST_TILE = 64
"""Queries and keys of a tile in rows of short sequences: larger ones would be computed for few visible pairs, smaller
ones start many small products."""


def _reach(window: int | None) -> int:
    return UNLIMITED if window is None else window


class Tile(NamedTuple):
    """Queries of this rank and keys of one block that are computed together."""

    queries: slice
    """Of this rank's tokens."""
    keys: slice
    """Of the tokens of the block."""
    whole: bool
    """Whether every query sees every key, so that no mask is needed."""


class Visibility(NamedTuple):
    """What decides which tokens see one another; each (n,) int64."""

    first: Tensor
    """The sequence that the token was computed for, the first that has it."""
    last: Tensor
    """The last sequence that has the token, as part of a shared prefix."""
    position: Tensor
    """In its sequence, from 0."""

    def of(self, tokens: Tensor) -> "Visibility":
        """Of some tokens."""
        return Visibility(*(numbers[tokens] for numbers in self))

    def mask(self, keys: "Visibility", window: int | None) -> Tensor:
        """(queries, keys) bool, true where a query (self) sees a key."""
        sequence, distance = self.first[:, None], self.position[:, None] - keys.position
        seen = (keys.first <= sequence) & (sequence <= keys.last) & (distance >= 0)
        return seen if window is None else seen & (distance < window)


@dataclass(frozen=True, eq=False)
class RowVisibility:
    """What is computed of a packed row on the CPU, for any division into blocks."""

    layout: PackedLayout

    @cached_property
    def tokens(self) -> Visibility:
        """Of the N tokens of the row."""
        lengths, prefixes = (torch.tensor(x, device=CPU) for x in (self.layout.lengths, self.layout.prefixes))
        own = lengths - prefixes
        first = torch.arange(len(own), device=CPU).repeat_interleave(own)
        begins = own.cumsum(0) - own - prefixes
        position = torch.arange(len(first), device=CPU) - begins[first]
        last = first.clone().scatter_reduce_(0, self.keys, self.sequences, "amax")
        return Visibility(first, last, position)

    @cached_property
    def _real(self) -> Tensor:
        lengths = torch.tensor(self.layout.lengths, device=CPU)
        return torch.arange(self.layout.places.shape[1], device=CPU) < lengths[:, None]

    @cached_property
    def keys(self) -> Tensor:
        """(K,) index into the row of the tokens of every sequence, shared prefixes again in each that has them."""
        return self.layout.places[self._real]

    @cached_property
    def sequences(self) -> Tensor:
        """(K,) the sequence of each."""
        return self._real.nonzero()[:, 0]

    @cached_property
    def begins(self) -> Tensor:
        """(K,) where in :attr:`keys` its sequence begins."""
        lengths = torch.tensor(self.layout.lengths, device=CPU)
        return (lengths.cumsum(0) - lengths)[self.sequences]

    @cached_property
    def query_places(self) -> Tensor:
        """(N,) where in :attr:`keys` each token of the row is as the query that it is computed for."""
        lengths = torch.tensor(self.layout.lengths, device=CPU)
        return (lengths.cumsum(0) - lengths)[self.tokens.first] + self.tokens.position

    def visible_pairs(self, blocks: Sequence[Tensor], window: int | None) -> Tensor:
        """(P, P) int64, how many pairs of a query of block i and a key of block j are visible.

        ``blocks``: P indices into the row, of the tokens of each.
        """
        count = len(blocks)
        block = torch.empty(len(self.tokens.first), dtype=torch.int64, device=CPU)
        for number, tokens in enumerate(blocks):
            block[tokens] = number
        of_keys = block[self.keys]
        until = self.query_places
        since = (until - _reach(window)).clamp_min(self.begins[until] - 1)
        pairs = torch.zeros(count, count, dtype=torch.int64, device=CPU)
        for number in range(count):
            seen = torch.nn.functional.pad((of_keys == number).cumsum(0), (1, 0))  # before each key
            pairs[:, number].index_add_(0, block, seen[until + 1] - seen[since + 1])
        return pairs


def hops_of(pairs: Tensor) -> tuple[int, ...]:
    """For each block, how far it must travel, from (P, P) :meth:`RowVisibility.visible_pairs`."""
    count = len(pairs)
    wanted = [[bool(pairs[(block + hop) % count, block]) for hop in range(count)] for block in range(count)]
    return tuple(max((hop for hop in range(count) if of_block[hop]), default=0) for of_block in wanted)


@dataclass(frozen=True)
class RingPlan:
    """What one rank of P computes and passes on for one window."""

    own: int
    """This rank's block."""
    sizes: tuple[int, ...]
    """Tokens of each block."""
    tiles: tuple[tuple[Tile, ...], ...]
    """For each block, its tiles of which this rank's queries see something."""
    hops: tuple[int, ...]
    """For each block, over how many ranks after its own it must travel until no query is left that sees a key of it."""
    window: int | None
    visibility: tuple[Visibility, ...]
    """Of each block, on the device of the queries."""

    @classmethod
    def of_row(
        cls,
        row: RowVisibility,
        blocks: Sequence[Tensor],
        own: int,
        window: int | None,
        size: int,
        device: torch.device,
    ) -> "RingPlan":
        """Plan tiles of at most ``size`` queries and keys, and of no more than a query sees on average."""
        pairs = row.visible_pairs(blocks, window)
        hops = hops_of(pairs)
        seen = int(pairs.sum()) // len(row.tokens.first)
        size = min(size, max(1 << seen.bit_length(), SMALLEST_TILE))
        visibility = [row.tokens.of(tokens) for tokens in blocks]
        tiles = _tiles(row, blocks, own, window, size)
        sent = send_together([numbers for of_block in visibility for numbers in of_block], device)
        moved = tuple(Visibility(*sent[3 * i : 3 * i + 3]) for i in range(len(blocks)))
        return cls(own, tuple(map(len, blocks)), tiles, hops, window, moved)

    def mask(self, tile: Tile, block: int) -> Tensor | None:
        """(queries, keys) bool of a tile of ``block``; ``None`` if all is visible."""
        if tile.whole:
            return None
        queries = Visibility(*(numbers[tile.queries] for numbers in self.visibility[self.own]))
        return queries.mask(Visibility(*(numbers[tile.keys] for numbers in self.visibility[block])), self.window)


def _tiles(
    row: RowVisibility, blocks: Sequence[Tensor], own: int, window: int | None, size: int
) -> tuple[tuple[Tile, ...], ...]:
    """The tiles of each block of which some query of block ``own`` sees something."""
    pieces = [(number, start) for number, tokens in enumerate(blocks) for start in range(0, len(tokens), size)]
    tile_of = torch.empty(len(row.tokens.first), dtype=torch.int64, device=CPU)
    for tile, (number, start) in enumerate(pieces):
        tile_of[blocks[number][start : start + size]] = tile
    bounds = _Bounds.of(row.tokens, tile_of, len(pieces))
    of_keys, reach = tile_of[row.keys], _reach(window)
    found: list[list[Tile]] = [[] for _ in blocks]
    for mine, (number, start) in enumerate(pieces):
        if number != own:
            continue
        queries = slice(start, min(start + size, len(blocks[own])))
        for seen in _seen_tiles(row, blocks[own][queries], of_keys, reach):
            block, begin = pieces[seen]
            keys = slice(begin, min(begin + size, len(blocks[block])))
            found[block].append(Tile(queries, keys, bounds.whole(mine, seen, reach)))
    return tuple(map(tuple, found))


def _seen_tiles(row: RowVisibility, queries: Tensor, of_keys: Tensor, reach: int) -> list[int]:
    """The tiles that have a key that one of the ``queries`` sees."""
    places = row.query_places[queries].sort().values
    begin = int(row.begins[places[0]])
    keys = torch.arange(begin, int(places[-1]) + 1, device=CPU)
    nearest = places[torch.searchsorted(places, keys)]  # the first query at or after each key
    visible = (nearest - keys < reach) & (row.begins[nearest] <= keys)
    found: list[int] = torch.unique(of_keys[keys[visible]]).tolist()
    return found


class _Bounds(NamedTuple):
    """Least and largest numbers of each tile, as lists."""

    first_least: list[int]
    first_most: list[int]
    last_least: list[int]
    position_least: list[int]
    position_most: list[int]

    @classmethod
    def of(cls, tokens: Visibility, tile_of: Tensor, count: int) -> "_Bounds":
        def bound(numbers: Tensor, how: str) -> list[int]:
            start = torch.zeros(count, dtype=torch.int64, device=CPU)
            found: list[int] = start.scatter_reduce_(0, tile_of, numbers, how, include_self=False).tolist()
            return found

        return cls(
            bound(tokens.first, "amin"),
            bound(tokens.first, "amax"),
            bound(tokens.last, "amin"),
            bound(tokens.position, "amin"),
            bound(tokens.position, "amax"),
        )

    def whole(self, queries: int, keys: int, reach: int) -> bool:
        """Whether every token of one tile sees every token of another: each condition holds for the extremes."""
        return (
            self.first_most[keys] <= self.first_least[queries]
            and self.first_most[queries] <= self.last_least[keys]
            and self.position_most[keys] <= self.position_least[queries]
            and self.position_most[queries] - self.position_least[keys] < reach
        )
