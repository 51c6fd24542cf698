"""Rows are read from any place on, over files and iterables, and one that cannot be read is named."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lazy_module import LazyModule

from rlhfkit.datamodules.streaming import RowReader
from rlhfkit.datamodules.tokenization.sources import read_rows

datasets = LazyModule("datasets")

Write = Callable[..., str]
ROWS = [{"text": str(i)} for i in range(10)]


def texts(reader: RowReader, first: int) -> list[str]:
    return [row["text"] for _, row in reader.read(first)]


@pytest.fixture
def folder(tmp_path: Path, write_rows: Write) -> Path:
    """Three files of 3, 4 and 3 rows, and a split of its own."""
    (tmp_path / "parts").mkdir()
    write_rows(ROWS[7:], "parts/train-c.jsonl")
    write_rows(ROWS[:3], "parts/train-a.jsonl")
    write_rows(ROWS[3:7], "parts/train-b.jsonl")
    write_rows([{"text": "held out"}], "parts/test-a.jsonl")
    return tmp_path / "parts"


def test_every_kind_of_source_is_read_from_any_row_on(
    folder: Path, write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    table = datasets.Dataset.from_list(ROWS)
    sources: list[Any] = [
        folder,
        str(folder / "train-?.jsonl"),
        "~/parts/**/train-*",
        write_rows(ROWS),
        write_rows(ROWS, "a.parquet"),
    ]
    sources += [ROWS, table, table.to_iterable_dataset(num_shards=2), write_rows(ROWS, "saved"), lambda: iter(ROWS)]
    for source in sources:
        reader = RowReader(source)
        assert reader.head[0] == ROWS[0]
        for first in (0, 1, 3, 5, 9, 10):
            assert texts(reader, first) == [row["text"] for row in ROWS[first:]], (source, first)
    places = [where for where, _ in RowReader(folder).read(5)]
    assert places[:2] == [f"{folder}/train-b.jsonl, row 2,", f"{folder}/train-b.jsonl, row 3,"]
    assert places[2] == f"{folder}/train-c.jsonl, row 0,"
    assert texts(RowReader(folder, split="test"), 0) == ["held out"]


def test_what_cannot_be_read_is_named(tmp_path: Path, folder: Path) -> None:
    bad = folder / "train-b.jsonl"
    bad.write_text(json.dumps(ROWS[0]) + '\n{"text": "x",\n')
    with pytest.raises(ValueError, match=r'train-b\.jsonl could not be read: line 2 \(row 1\) is no JSON.*"text": "x"'):
        texts(RowReader(folder), 0)
    bad.write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"train-b\.jsonl is not UTF-8: line 2"):
        texts(RowReader(folder), 0)
    with pytest.raises(FileNotFoundError, match=r"no file matches none-\*\.jsonl"):
        RowReader("none-*.jsonl")
    with pytest.raises(ValueError, match="has no split 'dev'; it has test, train"):
        RowReader(folder, split="dev")
    with pytest.raises(ValueError, match="the given rows has no rows"):
        RowReader(list)
    with pytest.raises(ValueError, match="must yield rows, mappings of columns to values, it yields 'a'"):
        RowReader(lambda: ["a"])


def test_empty_files_among_others_have_no_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "train-b.jsonl").write_bytes(b"")
    (folder / "train-d.jsonl.gz").write_bytes(gzip.compress(b""))
    assert texts(RowReader(folder), 2) == ["2", "7", "8", "9"]
    assert "train-b.jsonl is empty" in caplog.text
    assert "train-d.jsonl.gz is empty" in caplog.text
    for name in ("train-b.jsonl", "train-d.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"{name} (is empty|has no rows); at least one (row )?is needed"):
            RowReader(folder / name)
    with pytest.raises(ValueError, match=r"\[bd\]\.\* has no rows; at least one (row )?is needed"):
        RowReader(str(folder / "train-[bd].*"))


def test_files_of_another_format_in_a_folder_are_not_left_out_silently(
    folder: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """``datasets`` reads the files of one format."""
    write_rows([{"text": "table"}], "parts/train-d.parquet")
    assert len(texts(RowReader(folder), 0)) == 10
    assert "1 files of other formats than json are left out, such as train-d.parquet" in caplog.text
    caplog.clear()
    assert len(read_rows(folder)) == 10
    assert "1 files of other formats than json are left out, such as train-d.parquet" in caplog.text
    assert texts(RowReader(str(folder / "train-*")), 9) == ["9", "table"]
