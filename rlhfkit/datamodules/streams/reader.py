"""``RowReader``: the rows of a file, of the files of a folder or pattern, or of an iterable, from any row on."""

import glob
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rlhfkit.datamodules.tokenization.sources import (
    FORMATS,
    FirstRow,
    NoRowsError,
    describe,
    format_of,
    is_saved_dataset,
    readable,
    stream_rows,
    warn_of_files_left_out,
)

log = logging.getLogger(__name__)

_FIRST_ROWS = 16
"""Rows that are read when a source is opened."""

Row = Mapping[str, Any]

PlacedRow = tuple[str, Row]
"""Where a row stands, for messages (``"corpus.jsonl, row 7,"``), and the row."""


class _Part(Protocol):
    """Rows that have a name together: of a file, for example."""

    name: str

    def rows(self, first: int) -> Iterable[Any]:
        """The rows from ``first`` on."""
        ...

    def count(self) -> int:
        """Number of rows, by reading them."""
        ...


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
        self._parts: list[_Part]
        if isinstance(source, str | Path) and (files := _files(str(source), split, subset)):
            self._parts = [part for file in files for part in _opened(file)]
        elif callable(source):
            self._parts = [_Function(self.name, source)]
        else:
            self._parts = [_Dataset(self.name, stream_rows(source, split=split, subset=subset))]
        self.first_rows = [row for _, row in itertools.islice(self.read(0), _FIRST_ROWS)]
        """The rows by which a source is told from another."""
        if not self.first_rows:
            raise NoRowsError(f"{self.name} has no rows; at least one is needed")
        self.head = FirstRow(self.first_rows[0])
        """The first row, as a table."""

    def read(self, first: int) -> Iterator[PlacedRow]:
        """Yield the rows from ``first`` on, counted over all files."""
        for number, part in enumerate(self._parts):
            if first and number < len(self._parts) - 1 and first >= (count := part.count()):
                first -= count
                continue
            for place, row in enumerate(_read(part, first), first):
                yield f"{part.name}, row {place},", row
            first = 0


class _Dataset:
    """The rows of a ``datasets.IterableDataset``, which skips without converting rows to Python (datasets 5.2)."""

    def __init__(self, name: str, dataset: Any) -> None:
        self.name = name
        self._dataset = dataset
        self._count: int | None = None

    def rows(self, first: int) -> Iterable[Any]:
        rows: Iterable[Any] = self._dataset.skip(first) if first else self._dataset
        return rows

    def count(self) -> int:
        if self._count is None:
            with readable(self.name):
                self._count = sum(len(table) for table in self._dataset.with_format("arrow").iter(batch_size=10_000))
        return self._count


class _Function:
    """The rows that a function returns."""

    def __init__(self, name: str, make: Callable[[], Iterable[Row]]) -> None:
        self.name = name
        self._make = make

    def rows(self, first: int) -> Iterable[Any]:
        return itertools.islice(self._make(), first, None)

    def count(self) -> int:
        return sum(1 for _ in self._make())


def _opened(file: str) -> list[_Part]:
    """The rows of a file of several; none if it is empty."""
    try:
        return [_Dataset(file, stream_rows(file))]
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


def _read(part: _Part, first: int) -> Iterator[Row]:
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
