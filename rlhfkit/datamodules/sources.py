"""Reading the user's data: a file, a saved ``datasets`` folder, a hub name or rows in memory, all as one ``Dataset``.

Every mistake that can be seen here is reported here, naming the file, the column and what to do; every rank reads the
same data and so sees the same error.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Source = str | os.PathLike[str] | Sequence[Mapping[str, Any]]
"""A file (JSON lines, JSON, CSV, Parquet), a folder written by ``Dataset.save_to_disk``, a hub name, or rows."""

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
"""File suffix to the builder of ``datasets.load_dataset``; a compression's (``.gz``) behind it is skipped."""

_COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz"}

UNSUPPORTED = ("tools", "images", "image", "videos", "video", "audios", "audio")
"""Columns of other kinds of training. Leaving them out would train on something else than the data says."""


def read_rows(data: Any, *, split: str = "train", subset: str | None = None) -> "Dataset":
    """Open a source as a ``datasets.Dataset``; files are memory-mapped, not read into memory.

    Args:
        data: A path, hub name, list of rows, or a ``Dataset``.
        split: Split to take where the source has several (hub names, saved ``DatasetDict`` folders); slices such as
            ``"train[:90%]"`` work for files and hub names. A file is one split, whatever it is called.
        subset: Configuration of a hub data set (``"main"`` of ``openai/gsm8k``).

    Returns:
        At least one row.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If the source is empty, cannot be parsed, or has no such split.
    """
    import datasets

    if isinstance(data, datasets.Dataset):
        rows, name = data, "the given Dataset"
    elif isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        rows = _read_path(name, split, subset)
    elif isinstance(data, Sequence):
        name = "the given list of rows"
        rows = datasets.Dataset.from_list([dict(row) for row in data])
    else:
        raise ValueError(f"data must be a path, a hub name, a list of rows or a Dataset, got {type(data).__name__}")
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise ValueError(f"{name} has no split {split!r}; it has {', '.join(sorted(rows))}")
        rows = rows[split]
    if len(rows) == 0:
        raise ValueError(f"{name} has no rows; at least one is needed")
    return rows


def stream_rows(data: Any, *, split: str = "train", subset: str | None = None) -> "IterableDataset":
    """Open a source as a ``datasets.IterableDataset``: rows are read when they are asked for, and nothing is converted.

    Args:
        data: As for :func:`read_rows`, or an ``IterableDataset``.
        split: Split to take where the source has several; slices are not possible.
        subset: Configuration of a hub data set.

    Raises:
        FileNotFoundError: If a path does not exist.
        ValueError: If there is no such split, or the first row cannot be read.
    """
    import datasets

    if isinstance(data, datasets.IterableDataset):
        return data
    if not isinstance(data, str | os.PathLike):
        return read_rows(data).to_iterable_dataset()
    rows = _read_path(os.fspath(data), split, subset, streaming=True)
    if isinstance(rows, datasets.DatasetDict):
        rows = read_rows(data, split=split, subset=subset)
    return rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows


def _read_path(name: str, split: str, subset: str | None, **options: Any) -> Any:
    import datasets

    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / marker).exists() for marker in ("state.json", "dataset_dict.json")):
            return datasets.load_from_disk(str(path))
        return _load(name, str(path), name=subset, split=split, **options)
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in _COMPRESSIONS]
    builder = FORMATS.get(suffixes[-1].lower()) if suffixes else None
    if path.is_file():
        if builder is None:
            raise ValueError(f"cannot tell the format of {name} from its name: it must end in {', '.join(FORMATS)}")
        if path.stat().st_size == 0:
            raise ValueError(f"{name} is empty; at least one row is needed")
        if ".tsv" in suffixes:
            options["sep"] = "\t"
        split = re.sub(r"\w+", "train", split, count=1)  # a file has one split, whatever the caller calls it
        return _load(name, builder, data_files=str(path), split=split, **options)
    if builder is not None or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no such file or folder: {name} (in {Path.cwd()})")
    return _load(name, name, name=subset, split=split, **options)


def _load(source: str, *args: Any, **kwargs: Any) -> Any:
    """``datasets.load_dataset`` with one-line errors."""
    import datasets
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        return datasets.load_dataset(*args, **kwargs)
    except DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is neither a file, nor a folder, nor a data set on the hub: {error}"
        ) from error
    except ValueError as error:
        if "corresponds to no data" in str(error):  # how datasets 5.2 says that a table has a header and nothing else
            raise ValueError(f"{source} has no rows; at least one is needed") from error
        raise ValueError(f"{source} could not be read: {error}") from error
    except DatasetGenerationError as error:
        raise ValueError(f"{source} could not be read: {error.__cause__ or error}") from error


def check_columns(rows: "Dataset", source: Any, **columns: str | None) -> None:
    """Raise unless the named columns exist and have no missing values, and no column is of a kind we cannot train on.

    Args:
        rows: The data.
        source: Where it came from, for the message.
        **columns: Column by the name of the argument it was given in; ``None``: not used.

    Raises:
        ValueError: Naming the argument, the missing column and the columns there are, or a column of tools or images.
    """
    found = rows.column_names
    for kind in UNSUPPORTED:
        if kind in found and kind not in columns.values() and rows.data.column(kind).null_count < len(rows):
            raise ValueError(
                f"{describe(source)} has a column {kind!r}, which cannot be trained on yet (text only). To train "
                "without it, remove it from the data"
            )
    for argument, column in columns.items():
        if column is None:
            continue
        if column not in found:
            raise ValueError(f"{argument}={column!r} is not a column of {describe(source)}; it has {', '.join(found)}")
        values = rows.data.column(column)
        if values.null_count:
            row = next(index for index, value in enumerate(rows[column]) if value is None)
            raise ValueError(
                f"column {column!r} of {describe(source)} has {values.null_count} missing values, the first in row "
                f"{row}"
            )


def describe(source: Any) -> str:
    """How a source is called in messages."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "the given rows"


def load_tokenizer(tokenizer: Any, module: Any = None) -> Any:
    """The tokenizer to use.

    Args:
        tokenizer: A tokenizer, the folder or hub name of one, or ``None`` for the module's.
        module: The LightningModule being trained, if any.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(tokenizer, str | os.PathLike):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(os.fspath(tokenizer))
    if tokenizer is not None:
        return tokenizer
    found = getattr(module, "tokenizer", None)
    if found is None:
        raise ValueError(
            "no tokenizer: the LightningModule has none (attribute `tokenizer`), so give the DataModule one, "
            "tokenizer='folder or hub name'"
        )
    return found


def no_loader() -> list[Any]:
    """What ``val_dataloader`` returns when there is nothing to validate on.

    Lightning 2.6 takes the empty list for a loader of length 0 and warns of it in every run; that warning is
    silenced.
    """
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
    return []
