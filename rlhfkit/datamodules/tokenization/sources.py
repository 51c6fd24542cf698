"""Read the user's data: a file, a saved ``datasets`` folder, a hub name or rows in memory, all as a ``Dataset``.

Errors name the file, the column and what to do. Every rank reads the same data and raises the same error.
"""

import codecs
import csv
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhfkit.first_lines import without_file_bars
from rlhfkit.hub import HUB_NAME, why_hub_is_unreachable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

log = logging.getLogger(__name__)

Source = str | Sequence[Mapping[str, Any]] | os.PathLike[str]
"""A file (JSON lines, JSON, CSV, Parquet), a folder written by ``Dataset.save_to_disk``, a hub name, or rows.

Rows come before paths: a command line would make a path of their text.
"""

PlacedRow = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages (``"corpus.jsonl, row 7,"``), and the row."""

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""Builder of ``datasets.load_dataset`` by file suffix; a suffix of compression behind it (``.gz``) is ignored."""

_COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz"}

IMAGES = ("images", "image")
"""Columns of images: a list of them, or one; refused where the model does not see them."""

UNSUPPORTED = ("videos", "video", "audios", "audio")
"""Columns of other kinds of training; they are refused, because without them the rows mean something else."""


class NoRowsError(ValueError):
    """A source without rows."""


class RowPreview:
    """A table of one row, whose values need no types that a column of a table could have."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return list(self.row)

    def __len__(self) -> int:
        """One."""
        return 1

    def __getitem__(self, key: int | str) -> Any:
        """The row (0), or the values of a column."""
        return [self.row][key] if isinstance(key, int) else [self.row[key]]


def read_rows(data: Any, *, split: str = "train", subset: str | None = None) -> "Dataset":
    """Open a source as a ``datasets.Dataset`` with at least one row; files are memory-mapped.

    ``split`` may be a slice such as ``"train[:90%]"`` of a file or hub data set, but not of a saved ``DatasetDict``; a
    file has one split, under any name. ``subset`` is a configuration of a hub data set (``"main"`` of
    ``openai/gsm8k``).

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If the source is empty, cannot be parsed, or has no such split.
    """
    import datasets

    if isinstance(data, datasets.Dataset):
        rows, name = data, "the given Dataset"
        if rows.format["type"] not in (None, "custom"):  # tensors and arrays are no values of rows
            rows = rows.with_format(None)
    elif isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        rows = _read_path(name, split, subset)
    elif isinstance(data, Sequence):
        name = "the given list of rows"
        if not all(isinstance(row, Mapping) for row in data):
            odd = next(row for row in data if not isinstance(row, Mapping))
            raise ValueError(f"{name}: a row is a mapping such as {{'text': ...}}, got {odd!r:.80}")
        rows = _table([dict(row) for row in data])
    else:
        raise ValueError(f"data must be a path, a hub name, a list of rows or a Dataset, got {type(data).__name__}")
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(sorted(rows))}")
        rows = rows[split]
    rows = _with_encoded_images(rows)
    if len(rows) == 0:
        raise NoRowsError(f"{name} has no rows; at least one is needed")
    return rows


def stream_rows(data: Any, *, split: str = "train", subset: str | None = None) -> "IterableDataset":
    """Open a source as a ``datasets.IterableDataset``; rows are read when used, without conversion.

    Arguments are those of :func:`read_rows`, but ``data`` may be an ``IterableDataset``, and ``split`` cannot be a
    slice. Raises FileNotFoundError if a path does not exist, ValueError if there is no such split or the first row is
    unreadable.
    """
    import datasets

    if isinstance(data, datasets.IterableDataset):
        return data
    if not isinstance(data, str | os.PathLike):
        return read_rows(data).to_iterable_dataset()
    rows = _read_path(os.fspath(data), split, subset, streaming=True)
    if isinstance(rows, datasets.DatasetDict):
        rows = read_rows(data, split=split, subset=subset)
    return rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else _with_encoded_images(rows)


def _with_encoded_images(rows: Any) -> Any:
    """Rows whose images are paths or bytes, where ``datasets`` would decode them."""
    found = [name for name in IMAGES if name in (rows.features or ())]
    if not found:
        return rows
    import datasets

    encoded = datasets.Image(decode=False)
    for name in found:
        feature = rows.features[name]
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, encoded)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(name, datasets.List(encoded))
    return rows


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder was written by ``save_to_disk``."""
    return any((folder / marker).exists() for marker in ("state.json", "dataset_dict.json"))


def _read_path(name: str, split: str, subset: str | None, **options: Any) -> Any:
    import datasets

    path = Path(name).expanduser()
    if path.is_dir():
        if is_saved_dataset(path):
            return datasets.load_from_disk(str(path))
        rows = _load(name, str(path), name=subset, split=split, **options)
        warn_of_files_left_out(path, rows.info.builder_name)
        return rows
    builder = format_of(path)
    if path.is_file():
        if builder is None:
            raise ValueError(f"cannot tell the format of {name} from its name: it must end in {', '.join(FORMATS)}")
        if path.stat().st_size == 0:
            raise NoRowsError(f"{name} is empty; at least one row is needed")
        if ".tsv" in path.suffixes[-2:]:
            options["sep"] = "\t"
        if not options.get("streaming") and path.suffix not in _COMPRESSIONS:
            if builder == "json":
                _check_utf8(path)
            if builder == "csv":
                _check_quotes(path, options.get("sep", ","))
        split = re.sub(r"\w+", "train", split, count=1)  # the one split of a file
        return _load(name, builder, data_files=str(path), split=split, **options)
    if builder is not None or name.startswith(".") or not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"no such file or folder: {name[:200]} (in {Path.cwd()})")
    return _load_from_hub(name, name=subset, split=split, **options)


def _load_from_hub(name: str, /, **options: Any) -> Any:
    """Load a data set of the hub, or its copy in the cache if the hub does not answer.

    ``datasets`` would ask six times with growing pauses before it looks there.
    """
    import datasets

    online = not datasets.config.HF_HUB_OFFLINE
    reason = why_hub_is_unreachable(datasets.config.HF_ENDPOINT, offline=not online)
    datasets.config.HF_HUB_OFFLINE = reason is not None
    try:
        return _load(name, name, **options)
    except ConnectionError as error:
        raise ConnectionError(
            f"{name} is no file or folder in {Path.cwd()}, and as a data set of the hub it is not in the cache "
            f"({datasets.config.HF_DATASETS_CACHE}), and {reason or error}. Without a network give a local file, or a "
            "folder written by Dataset.save_to_disk, or load it once on a machine with a network and copy its cache"
            + ("; HF_HUB_OFFLINE=1 has the hub never asked" if online else "")
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = not online


def format_of(path: Path) -> str | None:
    """Builder of ``datasets`` for a file, by its name; ``None``: unknown."""
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in _COMPRESSIONS]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def warn_of_files_left_out(folder: Path, builder: str | None) -> None:
    """Warn if a folder has files of other formats than that of ``builder``: ``datasets`` reads those of one only."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if format_of(path) not in (None, builder)]
    others = sorted(str(path) for path in files if not any(part.startswith((".", "_")) for part in path.parts))
    if others:
        log.warning(
            "%s: %d files of other formats than %s are left out, such as %s: give each format as a source of its own",
            *(folder, len(others), builder, others[0]),
        )


def _load(source: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``datasets.load_dataset`` and raise one-line errors."""
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        bars = without_file_bars() if Path(source).expanduser().exists() else nullcontext()  # those of downloads stay
        with readable(source), bars:
            return datasets.load_dataset(*args, **kwargs)
    except DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is neither a file, nor a folder, nor a data set on the hub: {error}"
        ) from error
    except ValueError as error:
        if str(error).startswith(source):  # raised by this module
            raise
        if "corresponds to no data" in str(error):  # datasets 5.2 for a table with only a header
            raise NoRowsError(f"{source} has no rows; at least one is needed") from error
        raise ValueError(f"{source} could not be read: {error}") from error
    except StopIteration as error:  # datasets 5.2 for an empty file that is compressed
        raise NoRowsError(f"{source} has no rows; at least one is needed") from error
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise ValueError(_undecodable(source, error.__cause__)) from error
        raise ValueError(f"{source} could not be read: {error.__cause__ or error}") from error


@contextmanager
def readable(source: Any) -> Iterator[None]:
    """Replace the error of a text that is not UTF-8 by a ValueError that names file and line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(_undecodable(source, error)) from error


def _undecodable(source: Any, error: UnicodeDecodeError) -> str:
    """Return the error message for a file that is not UTF-8."""
    name, where = describe(source), ""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in _COMPRESSIONS:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as first:
                    shown = line[max(first.start - 20, 0) : first.start + 20]
                    where = f": line {number} has the byte 0x{line[first.start]:02x} ({shown!r})"
                    break
    return (
        f"{name} is not UTF-8{where or f' ({error})'}. Convert it, from Latin-1 for instance with "
        f"`iconv -f latin1 -t utf-8`"
    )


def _check_utf8(path: Path) -> None:
    """Raise ValueError if a file is not UTF-8, which Arrow's JSON reader reports only when a row is used."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with readable(path), path.open("rb") as file:
        while block := file.read(2**24):
            decoder.decode(block)
        decoder.decode(b"", final=True)


def _check_quotes(path: Path, separator: str) -> None:
    """Raise ValueError if a quote of a CSV file is missing, behind which rows would become part of one value."""
    longest = csv.field_size_limit(2**31 - 1)
    first = 1  # line of the row that is read
    try:
        with readable(path), path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, delimiter=separator, strict=True)
            for _ in rows:
                first = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}: the row that begins in line {first} has a quote too many or too few ({error}), so that it would "
            'swallow rows behind it: close its values with a quote, and write a quote inside of a value twice ("")'
        ) from error
    finally:
        csv.field_size_limit(longest)


def _table(rows: list[dict[str, Any]]) -> "Dataset":
    """Convert rows in memory to a table; ValueError if a column has values of several types."""
    import datasets
    import pyarrow  # type: ignore[import-untyped]  # it ships none

    try:
        return datasets.Dataset.from_list(rows)
    except pyarrow.ArrowException as error:  # its message names neither column nor row
        for column in rows[0]:
            kinds = [(index, type(row[column])) for index, row in enumerate(rows) if row.get(column) is not None]
            other = next((one for one in kinds if one[1] is not kinds[0][1]), None)
            if other is not None:
                raise ValueError(
                    f"column {column!r} of the given rows holds {kinds[0][1].__name__} in row {kinds[0][0]} and "
                    f"{other[1].__name__} in row {other[0]} ({rows[other[0]][column]!r:.80}): a column has one type, "
                    "so write all its values as the same"
                ) from error
        try:  # values inside a column may differ, such as content of messages that is a text or a list of parts
            return datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        except (pyarrow.ArrowException, TypeError):  # TypeError: datasets before 4.7
            raise ValueError(f"the given rows make no table: {error}") from error


def check_columns(rows: "Dataset | RowPreview", source: Any, /, **columns: str | None) -> None:
    """Raise ValueError unless the named columns exist without missing values, and there are none of videos or sound.

    ``columns`` maps the argument in which a column was given to the column; ``None``: not used.
    """
    found = rows.column_names
    for kind in UNSUPPORTED:
        if kind in found and kind not in columns.values() and _missing_values(rows, kind) < len(rows):
            raise ValueError(unsupported(describe(source), kind))
    for argument, column in columns.items():
        if column is None:
            continue
        if column not in found:
            raise ValueError(f"{argument}={column!r} is not a column of {describe(source)}; it has {', '.join(found)}")
        missing = _missing_values(rows, column)
        if missing:
            row = next(index for index, value in enumerate(rows[column]) if value is None)
            raise ValueError(
                f"column {column!r} of {describe(source)} has {missing} missing values, the first in row {row}"
            )


def _missing_values(rows: "Dataset | RowPreview", column: str) -> int:
    if isinstance(rows, RowPreview):
        return int(rows.row[column] is None)
    if rows._indices is None:
        return int(rows.data.column(column).null_count)
    # Rows were filtered, selected or shuffled, and the table behind them still has all.
    tables = rows.select_columns([column]).with_format("arrow").iter(10_000)
    return sum(table.column(column).null_count for table in tables)


def unsupported(where: str, column: str) -> str:
    """The error message for a column of videos or the like; ``where``: a source, or a row of it."""
    return (
        f"{where} has a column {column!r}, which cannot be trained on: texts and images can. To train without it, "
        "remove it from the data"
    )


def refuse_unseen_images(row: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a row has a column of images, for a model that sees none."""
    column = next((name for name in IMAGES if row.get(name)), None)
    if column is not None:
        raise ValueError(
            f"{where.removesuffix(',')} has a column {column!r}, and the model reads text only: take one that sees "
            "images (Qwen2.5-VL, Qwen3-VL, Gemma 3, SmolVLM, Idefics3 or LLaVA), or remove it from the data"
        )


def describe(source: Any) -> str:
    """Return the name of a source for messages."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "the given rows"


def no_loader() -> list[Any]:
    """Return an empty list, for ``val_dataloader`` without validation data.

    Lightning 2.6 takes it for a loader of length 0 and warns about that in every run; the warning is silenced.
    """
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    return []
