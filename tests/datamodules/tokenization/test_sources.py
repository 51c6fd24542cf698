"""Every kind of source gives the same rows, from any place on, and every mistake one clear error."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from jsonargparse import ArgumentParser
from lazy_module import LazyModule
from tiny_models import tiny_tokenizer

from rlhfkit.datamodules import SFTDataModule
from rlhfkit.datamodules.streaming import RowReader
from rlhfkit.datamodules.tokenization.sources import check_columns, read_rows

datasets = LazyModule("datasets")

ROWS = [{"prompt": "1+1=", "answer": "two"}, {"prompt": "2+2=", "answer": "four"}]

Write = Callable[..., str]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "folder"])
def test_formats_give_the_same_rows(write_rows: Write, name: str) -> None:
    assert read_rows(write_rows(ROWS, name)).to_list() == ROWS


def test_rows_and_datasets_in_memory(write_rows: Write) -> None:
    assert read_rows(ROWS).to_list() == ROWS
    assert read_rows(datasets.Dataset.from_list(ROWS)).to_list() == ROWS
    assert read_rows(Path(write_rows(ROWS))).to_list() == ROWS


def test_rows_that_were_filtered_out_of_a_dataset_count_no_more() -> None:
    """The table of a filtered Dataset has all rows."""
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c", None], "video": [None, None, "c", None]})
    check_columns(rows.filter(lambda row: row["text"] in ("a", "b")), "", text="text")
    with pytest.raises(ValueError, match="has a column 'video'"):
        check_columns(rows.filter(lambda row: row["text"] in ("a", "c")), "", text="text")
    with pytest.raises(ValueError, match="'text' of  has 1 missing values, the first in row 1"):
        check_columns(rows.filter(lambda row: row["text"] in ("b", None)), "", text="text")
    assert read_rows(rows.select([1]).with_format("numpy")).to_list() == [{"text": "b", "video": None}]


def test_compressed_file(tmp_path: Path, write_rows: Write) -> None:
    path = tmp_path / "b.jsonl.gz"
    path.write_bytes(gzip.compress(Path(write_rows(ROWS)).read_bytes()))
    assert read_rows(path).to_list() == ROWS


def test_splits_of_a_saved_folder(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[:1]), test=datasets.Dataset.from_list(ROWS[1:]))
    parts.save_to_disk(tmp_path / "both")
    assert read_rows(tmp_path / "both", split="test").to_list() == ROWS[1:]
    with pytest.raises(ValueError, match="no split 'validation'; it has test, train"):
        read_rows(tmp_path / "both", split="validation")


def test_a_file_is_one_split_whatever_it_is_called(write_rows: Write) -> None:
    path = write_rows(ROWS)
    assert read_rows(path, split="test").to_list() == ROWS
    assert read_rows(path, split="validation[:1]").to_list() == ROWS[:1]


def test_folder_of_files(tmp_path: Path, write_rows: Write) -> None:
    (tmp_path / "files").mkdir()
    write_rows(ROWS, "files/train.jsonl")
    write_rows(ROWS[:1], "files/test.jsonl")
    assert read_rows(tmp_path / "files", split="test").to_list() == ROWS[:1]


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/folder", "a/b/c"])
def test_missing_path(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no such file or folder: {name}"):
        read_rows(name)


NOBODY = "http://127.0.0.1:9"
"""An address at which nothing answers."""


@pytest.mark.parametrize(("offline", "reason"), [(True, "HF_HUB_OFFLINE forbids"), (False, f"{NOBODY} cannot be re")])
def test_a_hub_that_does_not_answer_is_an_error_within_seconds(
    offline: bool, reason: str, monkeypatch: pytest.MonkeyPatch, naps: list[float]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", NOBODY)
    with pytest.raises(ConnectionError, match=rf"nobody/nothing is no file or folder.*{reason}.*give a local file"):
        read_rows("nobody/nothing")
    assert sum(naps) < 5
    assert datasets.config.HF_HUB_OFFLINE is offline


def test_what_is_in_the_cache_of_the_hub_is_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` looks there alone when it is told that there is no hub."""

    def cached(*_: Any, **__: Any) -> Any:
        assert datasets.config.HF_HUB_OFFLINE
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", NOBODY)
    monkeypatch.setattr("datasets.load_dataset", cached)
    assert read_rows("nobody/nothing").to_list() == ROWS


def test_empty_sources(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        read_rows(empty)
    header = tmp_path / "header.csv"
    header.write_text("prompt,answer\n")
    with pytest.raises(ValueError, match=r"header\.csv has no rows"):
        read_rows(header)
    with pytest.raises(ValueError, match="the given list of rows has no rows"):
        read_rows([])


def test_broken_and_unknown_formats(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"broken\.jsonl could not be read"):
        read_rows(broken)
    unknown = tmp_path / "data.xyz"
    unknown.write_text("a")
    with pytest.raises(ValueError, match=r"data\.xyz from its name: it must end in \.jsonl"):
        read_rows(unknown)
    with pytest.raises(ValueError, match=r"data must be a path.*, got int"):
        read_rows(3)


def test_missing_values_are_counted_and_the_first_is_named(write_rows: Write) -> None:
    path = write_rows([*ROWS, {"prompt": "3", "answer": None}, {"prompt": "4", "answer": None}])
    with pytest.raises(ValueError, match=r"column 'answer' of .* has 2 missing values, the first in row 2"):
        check_columns(read_rows(path), path, answer="answer")


@pytest.mark.parametrize("name", ["latin.jsonl", "latin.csv"])
def test_a_file_that_is_not_utf8_is_named_with_line_byte_and_cure(tmp_path: Path, name: str) -> None:
    head = b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n' if name.endswith("jsonl") else b"prompt\ncaf\xe9\n"
    (tmp_path / name).write_bytes(head)
    message = rf"{name} is not UTF-8: line 2 has the byte 0xe9 .*iconv"
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name))
    data = SFTDataModule(
        str(tmp_path / name), streaming=True, text="prompt", steps_per_epoch=1, tokenizer=tiny_tokenizer()
    )
    with pytest.raises(ValueError, match=message):
        data.setup("fit") or next(data.stream.open())


def test_a_column_of_two_types_is_named_with_both_rows() -> None:
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}, {"prompt": 3, "level": 3}]
    with pytest.raises(ValueError, match=r"column 'prompt' of the given rows .* str in row 0 and int in row 2 \(3\)"):
        read_rows(rows)


@pytest.mark.skipif("not hasattr(datasets, 'Json')", reason="datasets before 4.7 has no column of mixed values")
def test_messages_in_memory_may_have_texts_and_lists_of_parts() -> None:
    parts = [{"type": "text", "text": "hi"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yo"}]}]
    assert read_rows(rows).to_list() == rows


FILES = {
    "two.json": b'[{"prompt": "1"}, {"prompt": "2"}]',
    "one.jsonl": b'{"prompt": "1"}',
    "empty.jsonl": b"",
    "broken.jsonl.gz": b"secret",
    "one.csv": b"prompt\n1\n",
    "one": b"secret",
}


def in_yaml(argument: str, value: Any) -> Any:
    """What a DataModule gets for an argument in a configuration file."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    arguments = {"data": "prompts.jsonl"} | {argument: value}
    config = parser.parse_object({"data": {"class_path": "rlhfkit.PromptDataModule", "init_args": arguments}})
    return getattr(parser.instantiate(config).data, argument)


@pytest.mark.parametrize("argument", ["data", "validation_data"])
def test_a_file_in_a_configuration_stays_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    """Where an object of a class may stand, jsonargparse hands over the content of a file that is named."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
        assert in_yaml(argument, name) == name
    assert in_yaml(argument, [{"prompt": "1+1="}]) == [{"prompt": "1+1="}]
    weights = {"two.json": 1, "one.csv": 3}
    described = {"class_path": "rlhfkit.Mixture", "init_args": {"weights": weights, "until": "first"}}
    for weighted, until in ((weights, "all"), (described, "first")):
        mixture = in_yaml(argument, weighted)
        assert (mixture.sources, mixture.weights, mixture.until) == (["two.json", "one.csv"], [0.25, 0.75], until)
    with pytest.raises(Exception, match=r"class_path: rlhfkit\.Mixture with .*got class_path 'rlhfkit\.Blend'"):
        in_yaml(argument, {"class_path": "rlhfkit.Blend", "init_args": {}})


@pytest.mark.parametrize("text", [str([{"prompt": "secret"}]), "a secret", "x\n", "a/b/c", "None?"])
def test_the_hub_is_not_asked_for_what_cannot_be_a_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"the hub was asked for {arguments}")

    monkeypatch.setattr("datasets.load_dataset", asked)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_rows(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('prompt,answer\n"a, b",1\n"c, d,2\n"e, f",3\n"g",4\n', 3),  # the quote behind d
        ('prompt,answer\na,1\n"c, d,2\ne,3\n', 3),  # to the end of the file
        ('prompt,answer\n"a\nb",1\n"c" d",2\n', 4),
    ],
)
def test_a_missing_quote_of_a_csv_file_is_found(tmp_path: Path, text: str, line: int) -> None:
    """Rows behind it were read as a part of one value, without a word."""
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.csv: the row that begins in line {line} has a quote too many"):
        read_rows(tmp_path / "a.csv")
    (tmp_path / "a.tsv").write_text(text.replace(",", "\t"))
    with pytest.raises(ValueError, match=rf"a\.tsv: the row that begins in line {line} has"):
        read_rows(tmp_path / "a.tsv")


def test_quotes_that_belong_there_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,answer\n"say ""hi"",\nplease",1\n5" wide,2\n' + f'"{"x" * 200_000}",3\n')
    assert read_rows(tmp_path / "a.csv")["prompt"][:] == ['say "hi",\nplease', '5" wide', "x" * 200_000]


# ---------------------------------------------------------------------- row by row

NUMBERED = [{"text": str(i)} for i in range(10)]


def texts(reader: RowReader, first: int) -> list[str]:
    return [row["text"] for _, row in reader.read(first)]


@pytest.fixture
def folder(tmp_path: Path, write_rows: Write) -> Path:
    """Three files of 3, 4 and 3 rows, and a split of its own."""
    (tmp_path / "parts").mkdir()
    write_rows(NUMBERED[7:], "parts/train-c.jsonl")
    write_rows(NUMBERED[:3], "parts/train-a.jsonl")
    write_rows(NUMBERED[3:7], "parts/train-b.jsonl")
    write_rows([{"text": "held out"}], "parts/test-a.jsonl")
    return tmp_path / "parts"


def test_every_kind_of_source_is_read_from_any_row_on(
    folder: Path, write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    table = datasets.Dataset.from_list(NUMBERED)
    sources: list[Any] = [
        folder,
        str(folder / "train-?.jsonl"),
        "~/parts/**/train-*",
        write_rows(NUMBERED),
        write_rows(NUMBERED, "a.parquet"),
    ]
    sources += [
        NUMBERED,
        table,
        table.to_iterable_dataset(num_shards=2),
        write_rows(NUMBERED, "saved"),
        lambda: iter(NUMBERED),
    ]
    for source in sources:
        reader = RowReader(source)
        assert reader.head[0] == NUMBERED[0]
        for first in (0, 1, 3, 5, 9, 10):
            assert texts(reader, first) == [row["text"] for row in NUMBERED[first:]], (source, first)
    places = [where for where, _ in RowReader(folder).read(5)]
    assert places[:2] == [f"{folder}/train-b.jsonl, row 2,", f"{folder}/train-b.jsonl, row 3,"]
    assert places[2] == f"{folder}/train-c.jsonl, row 0,"
    assert texts(RowReader(folder, split="test"), 0) == ["held out"]


def test_what_cannot_be_read_is_named(tmp_path: Path, folder: Path) -> None:
    bad = folder / "train-b.jsonl"
    bad.write_text(json.dumps(NUMBERED[0]) + '\n{"text": "x",\n')
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
