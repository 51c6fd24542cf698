"""Data that is read during training: rows of files and iterables from any place on, and streams of what they become.

A position in a stream is plain numbers, and the order behind it is derived from them again: rows are shuffled within
blocks, as a function of (seed, pass, block). ``datasets`` opens, decompresses and skips; its shuffle buffer is not
used, because it is not part of its state (measured with datasets 5.2: of the 3,000 rows after a resume with a buffer of
500, 353 were others, 13 came twice).
"""

import glob
import itertools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, TypeVar

import lightning as L

from rlhfkit.data.packing import permutation
from rlhfkit.datamodules.tokenization.mixture import Mixture, next_source
from rlhfkit.datamodules.tokenization.sources import (
    FORMATS,
    UNSUPPORTED,
    NoRowsError,
    PlacedRow,
    RowPreview,
    describe,
    format_of,
    is_saved_dataset,
    readable,
    stream_rows,
    unsupported,
    warn_of_files_left_out,
)
from rlhfkit.distributed import gather_objects

log = logging.getLogger(__name__)

T = TypeVar("T")

Position = list[list[int]]
"""Of each source: passes finished, rows of the pass that were used, examples so far, and how many parts of the next row
were used."""

_FIRST_ROWS = 16
"""Rows that are read when a source is opened."""


class RowReader:
    """Reads a source forward from any of its rows.

    A source is a path (a file, a folder of files, a pattern such as ``"part-*.jsonl"``, a folder of
    ``Dataset.save_to_disk``), a hub name, a ``datasets.IterableDataset`` or ``Dataset``, a list of rows, or a function
    without arguments that returns an iterable of rows, the same ones each time. Files are read one after another,
    sorted by name; empty ones among them are logged.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the source has no rows, no such split, or its first row is unreadable.
    """

    def __init__(self, source: Any, *, split: str = "train", subset: str | None = None) -> None:
        self.name = describe(source)
        if isinstance(source, str | Path) and (files := _files(str(source), split, subset)):
            self._parts = [part for file in files for part in _opened(file)]
        elif callable(source):
            self._parts = [_Part(self.name, source)]
        else:
            self._parts = [_Part(self.name, stream_rows(source, split=split, subset=subset))]
        self.first_rows = [row for _, row in itertools.islice(self.read(0), _FIRST_ROWS)]
        """The rows by which a source is told from another."""
        if not self.first_rows:
            raise NoRowsError(f"{self.name} has no rows; at least one is needed")
        self.head = RowPreview(self.first_rows[0])
        """The first row, as a table."""

    def read(self, first: int) -> Iterator[PlacedRow]:
        """Yield the rows from ``first`` on, counted over all files."""
        for number, part in enumerate(self._parts):
            if first and number < len(self._parts) - 1 and first >= (count := part.count):
                first -= count
                continue
            for place, row in enumerate(_read(part, first), first):
                yield f"{part.name}, row {place},", row
            first = 0


class _Part:
    """Rows that have a name together, such as those of a file.

    ``source`` is a ``datasets.IterableDataset``, which skips without converting rows to Python (datasets 5.2), or a
    function that returns rows.
    """

    def __init__(self, name: str, source: Any) -> None:
        self.name = name
        self.source = source

    def rows(self, first: int) -> Iterable[Any]:
        """The rows from ``first`` on."""
        if callable(self.source):
            return itertools.islice(self.source(), first, None)
        rows: Iterable[Any] = self.source.skip(first) if first else self.source
        return rows

    @cached_property
    def count(self) -> int:
        """Number of rows of a file, by reading them."""
        with readable(self.name):
            return sum(len(table) for table in self.source.with_format("arrow").iter(batch_size=10_000))


def _opened(file: str) -> list[_Part]:
    """The rows of a file of several; none if it is empty."""
    try:
        return [_Part(file, stream_rows(file))]
    except NoRowsError:
        log.warning("%s is empty", file)
        return []


def _files(name: str, split: str, subset: str | None) -> list[str]:
    """The files of a pattern, or those of a split of a folder; none for other names."""
    if glob.has_magic(name) and not Path(name).exists():
        pattern = str(Path(name).expanduser())
        files = sorted(file for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
        if not files:
            raise FileNotFoundError(f"no file matches {name} (in {Path.cwd()})")
        return files
    folder = Path(name).expanduser()
    if not folder.is_dir() or is_saved_dataset(folder):
        return []
    import datasets

    found = datasets.load_dataset_builder(str(folder), name=subset).config.data_files or {}
    splits = {str(key): sorted(map(str, files)) for key, files in found.items()}
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(sorted(splits)) or 'none'}")
    warn_of_files_left_out(folder, format_of(Path(splits[split][0])))
    return splits[split]


def _read(part: _Part, first: int) -> Iterator[Mapping[str, Any]]:
    """Yield rows; ValueError with the name and line of one that cannot be read."""
    import pyarrow  # type: ignore[import-untyped]  # it ships none

    rows = iter(part.rows(first))
    while True:
        try:
            with readable(part.name):
                row = next(rows, None)
        except (pyarrow.ArrowException, json.JSONDecodeError) as error:
            raise ValueError(f"{part.name} could not be read: {_bad_line(part.name) or error}") from error
        if row is None:
            return
        if not isinstance(row, Mapping):
            raise ValueError(f"{part.name} must yield rows, mappings of columns to values, it yields {row!r:.80}")
        yield row


def _bad_line(name: str) -> str | None:
    """Which line of a file of JSON lines is no JSON; ``None``: unknown."""
    path = Path(name).expanduser()
    if FORMATS.get(path.suffix.lower()) != "json" or not path.is_file():
        return None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line)
            except ValueError as error:
                return f"line {number} (row {number - 1}) is no JSON, {error}: {line.strip()[:80]!r}"
    return None


Transform = Callable[[Sequence[PlacedRow]], Iterator[list[T]]]
"""Yields what each of some rows becomes, in their order: nothing, one example or several. May log counts at the end."""


class SourceStream(Generic[T]):
    """What the rows of one source become, pass after pass.

    Args:
        reader: The rows.
        transform: Makes examples, pairs or prompts of them.
        columns: Columns that every row must have.
        block: Rows that are in memory at a time, and shuffled together.
        seed: Of the shuffling; ``None``: the order of the source.
        what: What the source has none of if no row becomes anything, for the error.
    """

    def __init__(
        self,
        reader: RowReader,
        transform: Transform[T],
        *,
        columns: Collection[str],
        block: int,
        seed: int | None,
        what: str = "a token to learn",
    ) -> None:
        self.reader = reader
        self.transform = transform
        self.columns = columns
        self.block = block
        self.seed = seed
        self.what = what

    def open(self, number: int, row: int, part: int = 0) -> Iterator[tuple[int, int, int, T]]:
        """Yield (pass, row and part behind it, example) without end, from a part of a row of a pass on.

        One example is read ahead, so that the position behind the last one of a pass is the beginning of the next.

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
        """Yield (row and part behind it, example) until the end of the pass."""
        first = row // self.block * self.block
        rows = self.reader.read(first)
        while block := list(itertools.islice(rows, self.block)):
            order = list(range(len(block)))
            if self.seed is not None:
                order = permutation(len(block), seed=self.seed, number=(number << 40) + first)
            turns = range(max(row - first, 0), len(block))
            for turn, made in zip(
                turns, self.transform([self._checked(block[order[turn]]) for turn in turns]), strict=True
            ):
                for done, example in enumerate(made, 1):
                    if first + turn == row and done <= part:
                        continue  # in front of the position at which the stream was opened
                    yield (first + turn + 1, 0, example) if done == len(made) else (first + turn, done, example)
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
    def fingerprint_parts(self) -> list[object]:
        """What the order of the stream depends on: the first rows, in the columns that are read, seed and block."""
        rows = [[row.get(column) for column in sorted(self.columns)] for row in self.reader.first_rows]
        return [rows, self.seed, self.block]


class MixedStream(Generic[T]):
    """Streams of one or several sources, interleaved by weight, without end.

    Args:
        data: The source, or a mixture of sources.
        sources: The stream of each.

    Raises:
        ValueError: If ranks read different rows, and so would train on some twice and leave others out. A collective.
    """

    def __init__(self, data: Any, sources: Sequence[SourceStream[T]]) -> None:
        self.sources = sources
        self.weights = data.weights if isinstance(data, Mixture) else [1.0]
        self._until = data.until if isinstance(data, Mixture) else "all"
        self.fingerprint = self._fingerprint_of_all_ranks()
        """Digest of what positions depend on, as far as the first rows tell."""

    def _fingerprint_of_all_ranks(self) -> str:
        # Objects of other types, which have no text of their own, count by their type.
        parts = [[stream.fingerprint_parts for stream in self.sources], list(self.weights)]
        what = json.dumps(parts, skipkeys=True, default=lambda value: type(value).__name__)
        digest = blake2b(what.encode(), digest_size=16).hexdigest()
        if len({*gather_objects(digest)}) > 1:
            raise ValueError(
                f"the ranks read different rows from {' and '.join(stream.reader.name for stream in self.sources)}, "
                "and every rank must read all of them in the same order: give shuffle() and interleave_datasets() of "
                "datasets a seed, do not split the data by rank, and use the same files on all machines"
            )
        return digest

    def open(self, position: Position | None = None) -> Iterator[tuple[Position, T]]:
        """Yield (position behind it, example) endlessly from a position on; ``None``: from the beginning."""
        places = [list(one) for one in position] if position is not None else [[0, 0, 0, 0] for _ in self.sources]
        opened = [stream.open(one[0], one[1], one[3]) for stream, one in zip(self.sources, places, strict=True)]
        while True:
            source = next_source(self.weights, [one[2] for one in places])
            number, row, part, example = next(opened[source])
            places[source] = [number, row, places[source][2] + 1, part]
            yield [list(one) for one in places], example

    def stop_after(self, passes: int | None, trainer: L.Trainer, position: Position | None) -> None:
        """Set a Trainer's ``should_stop`` if all sources were read ``passes`` times in front of a position.

        With ``Mixture(until="first")``, if the first one was. The batch or iteration in which the last pass ends is
        filled from the next one, so that every row is used and all batches have their size.
        """
        if passes is None or position is None:
            return
        if (min if self._until == "all" else max)(one[0] for one in position) >= passes:
            trainer.should_stop = True
            log.info("passes=%d over the data are finished: the run ends", passes)
