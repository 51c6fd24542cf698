"""Rows are tokenised once, by any number of processes, and the cache is never stale."""

import os
from pathlib import Path
from typing import Any

import pytest
from lazy_module import LazyModule
from tiny_models import ROLES, chat_tokenizer, tiny_tokenizer

from rlhfkit.datamodules import SFTDataModule
from rlhfkit.datamodules.tokenization.cache import fingerprint
from rlhfkit.datamodules.tokenization.examples import ExampleBuilder
from rlhfkit.datamodules.tokenization.sources import read_rows

from ..opened import Write

datasets = LazyModule("datasets")

ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 5) + str(i + 1)} for i in range(40)]


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever rows are tokenised."""
    calls: list[int] = []
    original = ExampleBuilder.results

    def counted(self: ExampleBuilder, rows: Any) -> Any:
        calls.append(len(rows))
        return original(self, rows)

    monkeypatch.setattr(ExampleBuilder, "results", counted)
    return calls


def module(data: Any, **options: Any) -> SFTDataModule:
    made = SFTDataModule(data, **({"tokenizer": tiny_tokenizer(), "max_length": 8} | options))
    made.prepare_data()
    made.setup("fit")
    return made


def content(data: SFTDataModule) -> list[Any]:
    return [data.examples[index] for index in range(len(data.examples))]


def test_a_second_start_does_not_tokenise_and_says_the_same(
    write_rows: Write, tokenised: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(ROWS)
    first = module(path)
    assert tokenised == [40]  # prepare_data and setup together
    assert "were truncated" in caplog.text
    said = {*caplog.messages}
    caplog.clear()
    second = module(path)
    assert tokenised == [40]
    assert content(second) == content(first)
    assert second.examples.rows == first.examples.rows
    assert second.examples.targets == first.examples.targets
    assert {*caplog.messages} == said


def test_what_examples_depend_on_makes_new_ones(write_rows: Write, tokenised: list[int]) -> None:
    path = write_rows(ROWS)
    templated, other = chat_tokenizer(), tiny_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["+1="]})
    chat, renamed = {"max_length": 40, "tokenizer": templated}, {"prompt": "completion", "completion": "prompt"}
    variants: list[dict[str, Any]] = [{}, {"max_length": 7}, {"overlong": "drop"}, renamed, {"tokenizer": other}, chat]
    more: list[dict[str, Any]] = [{"apply_chat_template": False}, {"system": "S"}, {"chat_template_kwargs": {"x": 1}}]
    variants += [chat | one for one in more]
    for number, options in enumerate(variants, 1):
        module(path, **options)
        assert len(tokenised) == number, options
    for options in variants:
        module(path, **options)
    assert len(tokenised) == len(variants)
    module(path, tokenizer=chat_tokenizer(ROLES.replace("<a>", "<b>")), max_length=40)
    assert len(tokenised) == len(variants) + 1


def test_a_changed_file_is_read_anew(write_rows: Write, tokenised: list[int]) -> None:
    path = write_rows(ROWS)
    first = module(path)
    write_rows([*ROWS[:-1], {"prompt": "7", "completion": "8"}])
    os.utime(path, ns=(1, 1))  # as old as you like: another time than before
    second = module(path)
    assert len(tokenised) == 2
    assert content(second)[:-1] == content(first)[:-1]
    assert content(second)[-1] != content(first)[-1]


def test_use_of_the_tokenizer_does_not_change_its_fingerprint() -> None:
    rows, tokenizer = read_rows(ROWS), tiny_tokenizer()
    before = fingerprint(rows, tokenizer, {})
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert fingerprint(rows, tokenizer, {}) == before


def test_rows_in_memory_are_kept_only_where_a_folder_is_named_that_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenised: list[int]
) -> None:
    for options, times, files in (({}, 2, 0), ({"cache_dir": tmp_path / "kept"}, 3, 1)):
        for _ in range(2):
            module(ROWS, **options)
        assert tokenised == [40] * times
        assert len(list(tmp_path.rglob("tokens-*"))) == files
    (tmp_path / "file").touch()
    assert len(module(ROWS, cache_dir=tmp_path / "file").examples) == 40
    assert "cannot be kept for the next start" in caplog.text


def test_several_processes_make_the_same_examples(tmp_path: Path, write_rows: Write) -> None:
    rows = (ROWS * 28)[:1100]
    path = write_rows(rows)
    one = module(path, max_length=9)
    two = module(path, max_length=9, num_proc=2, cache_dir=tmp_path / "other")
    assert content(two) == content(one)
    assert two.examples.counts == one.examples.counts
    with pytest.raises(ValueError, match=r"row 1030, must hold text.* NoneType|missing values"):
        module([*rows[:1030], {"prompt": None, "completion": "a"}], num_proc=2)


def test_files_are_whole_or_absent_and_read_lazily(tmp_path: Path) -> None:
    import pyarrow

    messages = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}] * 1200
    broken = [{"messages": [{"role": "assistant", "content": "2"}]}]
    tokenizer = chat_tokenizer("{% if messages[0].role != 'user' %}{{ raise_exception('who?') }}{% endif %}" + ROLES)
    with pytest.raises(ValueError, match="row 1200, is not accepted"):
        module([*messages, *broken], tokenizer=tokenizer, cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())
    module(ROWS * 250, cache_dir=tmp_path)
    assert [file.suffix for file in tmp_path.iterdir()] == [".arrow"]
    before = pyarrow.total_allocated_bytes()
    examples = module(ROWS * 250, cache_dir=tmp_path).examples
    assert examples[9_999] == examples[39]
    assert pyarrow.total_allocated_bytes() - before < 200_000  # of 10,000 rows, whose columns have 250,000 each


def test_a_saved_folder_of_arrow_files_is_kept_outside_of_it(write_rows: Write, tokenised: list[int]) -> None:
    folder = write_rows(ROWS, "arrow")
    before = sorted(Path(folder).iterdir())
    for _ in range(2):
        module(folder)
    assert tokenised == [40]
    assert sorted(Path(folder).iterdir()) == before
    assert list((Path(datasets.config.HF_DATASETS_CACHE) / "rlhfkit").glob("tokens-*.arrow"))
