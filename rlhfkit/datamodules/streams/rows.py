"""Endless, shuffled, resumable streams of what rows become: examples, pairs or prompts.

A position is plain numbers, and the order behind it is derived from them again: rows are shuffled within blocks, as a
function of (seed, pass, block). The shuffle buffer of ``datasets`` is not used, because it is not part of its state
(measured with datasets 5.2: of the 3,000 rows after a resume with a buffer of 500, 353 were others, 13 came twice).
"""

import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Generic, Literal, TypeVar

from rlhfkit.data.packing import permutation
from rlhfkit.datamodules.streams.reader import PlacedRow, RowReader
from rlhfkit.datamodules.tokenization.sources import UNSUPPORTED, unsupported
from rlhfkit.distributed import gather_objects

log = logging.getLogger(__name__)

T = TypeVar("T")

Make = Callable[[Sequence[PlacedRow]], Iterator[list[T]]]
"""Yields what each of some rows becomes, in their order: nothing, one thing or several. May log counts at the end."""

Position = list[list[int]]
"""Of each source: passes finished, rows of the pass that were used, things so far, and parts of the next row that were
used."""


class SourceStream(Generic[T]):
    """What the rows of one source become, pass after pass.

    Args:
        reader: The rows.
        make: Makes them into something.
        columns: Columns that every row must have.
        block: Rows that are in memory at a time, and shuffled together.
        seed: Of the shuffling; ``None``: the order of the source.
        what: What the source has none of if no row becomes anything, for the error.
    """

    def __init__(
        self,
        reader: RowReader,
        make: Make[T],
        *,
        columns: Collection[str],
        block: int,
        seed: int | None,
        what: str = "a token to learn",
    ) -> None:
        self.reader = reader
        self.make = make
        self.columns = columns
        self.block = block
        self.seed = seed
        self.what = what

    def open(self, number: int, row: int, part: int = 0) -> Iterator[tuple[int, int, int, T]]:
        """Yield (pass, row and part behind it, thing) without end, from a part of a row of a pass on.

        One thing is read ahead, so that the position behind the last one of a pass is the beginning of the next.

        Raises:
            ValueError: If a row cannot be read, or no row of the whole data becomes anything.
        """
        while True:
            last: tuple[int, int, T] | None = None
            for found in self._pass(number, row, part):
                if last is not None:
                    yield (number, *last)
                last = found
            if last is None and row == 0:
                raise ValueError(f"{self.reader.name}: no row of the whole data has {self.what}: check the columns")
            number, row, part = number + 1, 0, 0
            log.info("%s: pass %d begins", self.reader.name, number + 1)
            if last is not None:
                yield number, 0, 0, last[-1]

    def _pass(self, number: int, row: int, part: int) -> Iterator[tuple[int, int, T]]:
        """Yield (row and part behind it, thing) until the end of the pass."""
        first = row // self.block * self.block
        rows = self.reader.read(first)
        while block := list(itertools.islice(rows, self.block)):
            order = list(range(len(block)))
            if self.seed is not None:
                order = permutation(len(block), seed=self.seed, number=(number << 40) + first)
            turns = range(max(row - first, 0), len(block))
            for turn, made in zip(turns, self.make([self._checked(block[order[turn]]) for turn in turns]), strict=True):
                for done, thing in enumerate(made, 1):
                    if first + turn == row and done <= part:
                        continue  # in front of the position at which the stream was opened
                    yield (first + turn + 1, 0, thing) if done == len(made) else (first + turn, done, thing)
            first += len(block)

    def _checked(self, placed: PlacedRow) -> PlacedRow:
        where, row = placed
        missing = next((column for column in self.columns if row.get(column) is None), None)
        if missing is not None:
            raise ValueError(f"column {missing!r} of {where} has no value")
        other = next((kind for kind in UNSUPPORTED if row.get(kind) is not None and kind not in self.columns), None)
        if other is not None:
            raise ValueError(unsupported(where.removesuffix(","), other))
        return placed

    @property
    def described(self) -> list[object]:
        """What the order of the stream depends on: the first rows, in the columns that are read, seed and block."""
        rows = [[row.get(column) for column in sorted(self.columns)] for row in self.reader.first_rows]
        return [rows, self.seed, self.block]


def fingerprint(streams: Sequence[SourceStream[T]], weights: Sequence[float]) -> str:
    """Digest of what positions in interleaved streams depend on, as far as the first rows tell. A collective.

    Raises:
        ValueError: If it differs between ranks, which would then train on rows twice and leave others out.
    """
    # Objects of other types, which have no text of their own, count by their type.
    described = [[stream.described for stream in streams], list(weights)]
    what = json.dumps(described, skipkeys=True, default=lambda value: type(value).__name__)
    digest = blake2b(what.encode(), digest_size=16).hexdigest()
    if len({*gather_objects(digest)}) > 1:
        raise ValueError(
            f"the ranks read different rows from {' and '.join(stream.reader.name for stream in streams)}, and every "
            "rank must read all of them in the same order: give shuffle() and interleave_datasets() of datasets a "
            "seed, do not split the data by rank, and use the same files on all machines"
        )
    return digest


def interleave(
    streams: Sequence[SourceStream[T]], weights: Sequence[float], position: Position | None = None
) -> Iterator[tuple[Position, T]]:
    """Yield (position behind it, thing) endlessly, from the source that is furthest behind its share.

    ``position``: where to begin; ``None``: at the beginning.
    """
    places = [[*one, 0][:4] for one in position] if position is not None else [[0, 0, 0, 0] for _ in weights]
    opened = [stream.open(one[0], one[1], one[3]) for stream, one in zip(streams, places, strict=True)]
    while True:
        total = sum(one[2] for one in places) + 1
        missing = [weight * total - one[2] for weight, one in zip(weights, places, strict=True)]
        source = missing.index(max(missing))
        number, row, part, thing = next(opened[source])
        places[source] = [number, row, places[source][2] + 1, part]
        yield [list(one) for one in places], thing


def passes_finished(position: Position | None, until: Literal["all", "first"] = "all") -> int:
    """How often all sources, or the first one to be finished, were read to the end."""
    if position is None:
        return 0
    return (min if until == "all" else max)(one[0] for one in position)
