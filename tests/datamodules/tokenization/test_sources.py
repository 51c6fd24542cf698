"""Every kind of source gives the same rows, from any place on, and every mistake one clear error."""

import gzip
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from jsonargparse import ArgumentParser
from lazy_module import LazyModule

from rlhfkit.datamodules.streaming import RowReader
from rlhfkit.datamodules.tokenization.sources import check_columns, read_rows

from ..opened import Write

datasets = LazyModule("datasets")

ROWS = [{"prompt": "1+1=", "answer": "two"}, {"prompt": "2+2=", "answer": "four"}]


def test_rows_that_were_filtered_out_of_a_dataset_count_no_more() -> None:
    """The table of a filtered Dataset has all rows."""
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c", None], "video": [None, None, "c", None]})
    check_columns(rows.filter(lambda row: row["text"] in ("a", "b")), "", text="text")
    with pytest.raises(ValueError, match="has a column 'video'"):
        check_columns(rows.filter(lambda row: row["text"] in ("a", "c")), "", text="text")
    with pytest.raises(ValueError, match="'text' of  has 1 missing values, the first in row 1"):
        check_columns(rows.filter(lambda row: row["text"] in ("b", None)), "", text="text")
    assert read_rows(rows.select([1]).with_format("numpy")).to_list() == [{"text": "b", "video": None}]


def test_splits_of_a_saved_folder_and_of_a_file(tmp_path: Path, write_rows: Write) -> None:
    parts = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS[:1]), test=datasets.Dataset.from_list(ROWS[1:]))
    parts.save_to_disk(tmp_path / "both")
    assert read_rows(tmp_path / "both", split="test").to_list() == ROWS[1:]
    with pytest.raises(ValueError, match="no split 'validation'; it has test, train"):
        read_rows(tmp_path / "both", split="validation")
    path = write_rows(ROWS)  # a file is one split, whatever it is called
    assert read_rows(path, split="test").to_list() == ROWS
    assert read_rows(path, split="validation[:1]").to_list() == ROWS[:1]


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
    for name, content in (("empty.jsonl", b""), ("header.csv", b"prompt,answer\n"), ("a.jsonl.gz", gzip.compress(b""))):
        (tmp_path / name).write_bytes(content)
        for read in (read_rows, RowReader):
            with pytest.raises(ValueError, match=rf"{name} (is empty|has no rows)"):
                read(tmp_path / name)
    with pytest.raises(ValueError, match="the given list of rows has no rows"):
        read_rows([])


def test_broken_and_unknown_formats(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"broken\.jsonl could not be read"):
        read_rows(broken)
    broken = broken.rename(tmp_path / "data.xyz")
    with pytest.raises(ValueError, match=r"data\.xyz from its name: it must end in \.jsonl"):
        read_rows(broken)
    with pytest.raises(ValueError, match=r"data must be a path.*, got int"):
        read_rows(3)


@pytest.mark.parametrize("name", ["latin.jsonl", "latin.csv"])
def test_a_file_that_is_not_utf8_is_named_with_line_byte_and_cure(tmp_path: Path, name: str) -> None:
    head = b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n' if name.endswith("jsonl") else b"prompt\ncaf\xe9\n"
    (tmp_path / name).write_bytes(head)
    for read in (read_rows, lambda path: [*RowReader(path).read(0)]):
        with pytest.raises(ValueError, match=rf"{name} is not UTF-8: line 2 has the byte 0xe9 .*iconv"):
            read(str(tmp_path / name))


def test_a_column_of_two_types_is_named_with_both_rows() -> None:
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}, {"prompt": 3, "level": 3}]
    with pytest.raises(ValueError, match=r"column 'prompt' of the given rows .* str in row 0 and int in row 2 \(3\)"):
        read_rows(rows)


@pytest.mark.skipif("not hasattr(datasets, 'Json')", reason="datasets before 4.7 has no column of mixed values")
def test_messages_in_memory_may_have_texts_and_lists_of_parts() -> None:
    parts = [{"type": "text", "text": "hi"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yo"}]}]
    assert read_rows(rows).to_list() == rows


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
    for name, content in (("two.json", "[{}, {}]"), ("one.jsonl", '{"prompt": 1}'), ("one.csv", "a\n1"), ("one", "")):
        Path(name).write_text(content)
        assert in_yaml(argument, name) == name
    assert in_yaml(argument, [{"prompt": "1+1="}]) == [{"prompt": "1+1="}]
    weights = {"two.json": 1, "one.csv": 3}
    described = {"class_path": "rlhfkit.Mixture", "init_args": {"weights": weights, "until": "first"}}
    for weighted, until in ((weights, "all"), (described, "first")):
        mixture = in_yaml(argument, weighted)
        assert (mixture.sources, mixture.weights, mixture.until) == (["two.json", "one.csv"], [0.25, 0.75], until)
    with pytest.raises(Exception, match=r"class_path: rlhfkit\.Mixture with .*got class_path 'rlhfkit\.Blend'"):
        in_yaml(argument, {"class_path": "rlhfkit.Blend", "init_args": {}})


@pytest.mark.parametrize(
    "text", ["missing.jsonl", "./missing", "/no/such", str([{"prompt": "secret"}]), "a secret", "x\n", "a/b/c", "None?"]
)
def test_the_hub_is_not_asked_for_what_cannot_be_a_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("datasets.load_dataset")
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
    (tmp_path / "a.tsv").write_text(text.replace(",", "\t"))
    for name in ("a.csv", "a.tsv"):
        with pytest.raises(ValueError, match=rf"{name}: the row that begins in line {line} has a quote too many"):
            read_rows(tmp_path / name)


def test_quotes_that_belong_there_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,answer\n"say ""hi"",\nplease",1\n5" wide,2\n' + f'"{"x" * 200_000}",3\n')
    assert read_rows(tmp_path / "a.csv")["prompt"][:] == ['say "hi",\nplease', '5" wide', "x" * 200_000]


# ---------------------------------------------------------------------- row by row

NUMBERED = [{"text": str(i)} for i in range(10)]


def texts(reader: RowReader, first: int) -> list[str]:
    return [str(row["text"]) for _, row in reader.read(first)]


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
    packed = folder.parent / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(write_rows(NUMBERED)).read_bytes()))
    names = [f"a.{kind}" for kind in ("jsonl", "json", "csv", "tsv", "parquet")]
    sources: list[Any] = [folder, packed, *(write_rows(NUMBERED, name) for name in [*names, "saved"]), NUMBERED, table]
    for source in sources:  # as a whole; types are those of the file
        assert [{"text": str(row["text"])} for row in read_rows(source)] == NUMBERED, source
    assert read_rows(folder, split="test").to_list() == [{"text": "held out"}]
    sources += [str(folder / "train-?.jsonl"), "~/parts/**/train-*", table.to_iterable_dataset(num_shards=2)]
    for source in [*sources, lambda: iter(NUMBERED)]:
        reader = RowReader(source)
        assert str(reader.head[0]["text"]) == "0"
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
    with pytest.raises(ValueError, match=r"\[bd\]\.\* has no rows; at least one (row )?is needed"):
        RowReader(str(folder / "train-[bd].*"))


def test_files_of_another_format_in_a_folder_are_not_left_out_silently(
    folder: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """``datasets`` reads the files of one format."""
    write_rows([{"text": "table"}], "parts/train-d.parquet")
    for read in (read_rows, lambda path: texts(RowReader(path), 0)):
        caplog.clear()
        assert len(read(folder)) == 10
        assert "1 files of other formats than json are left out, such as train-d.parquet" in caplog.text
    assert texts(RowReader(str(folder / "train-*")), 9) == ["9", "table"]
