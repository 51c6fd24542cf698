"""Properties of stepwise data: where steps are judged, which labels they get, what is cut and what is refused.

Covers data/formats.py too.
"""

import logging
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from tiny_models import chat_tokenizer, tiny_tokenizer
from tokenizers import Regex, normalizers

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import StepwiseExample
from rlhfkit.datamodules import StepwiseDataModule

from .opened import Write, opened

ROWS = [
    {"prompt": "1+1=", "completions": ["a", "bc", "2"], "labels": [True, False, True]},
    {"prompt": "2?", "completions": ["", "dd"], "labels": [False, True]},
]


module = partial(opened, StepwiseDataModule)


def read(data: StepwiseDataModule) -> list[tuple[str, str, list[float]]]:
    """The text, a ``^`` below the last token of each step, and the labels."""
    found = []
    for index in range(len(data.examples.lengths)):
        example = data.examples[index]
        text = "".join(tiny_tokenizer().convert_ids_to_tokens(example.answer.input_ids))
        marks = "".join("^" if end else "_" for end in example.answer.loss_mask)
        found.append((text.replace("\n", "/"), marks, example.labels))
    return found


def test_a_step_is_judged_at_the_end_of_its_separator(write_rows: Write) -> None:
    data = module(write_rows(ROWS))
    assert read(data) == [("1+1=a/bc/2/", "_____^__^_^", [1.0, 0.0, 1.0]), ("2?/dd/", "__^__^", [0.0, 1.0])]
    assert (data.examples.lengths, data.examples.targets) == ([11, 6], [3, 2])


def test_separators_may_be_long_and_prompts_chats(write_rows: Write) -> None:
    rows = [{"question": [{"role": "user", "content": "1"}], "steps": ["a", "b"], "good": [0.25, 1]}]
    columns = {"prompt": "question", "completions": "steps", "labels": "good"}
    data = module(write_rows(rows), **columns, separator="##", tokenizer=chat_tokenizer())
    assert read(data) == [("<u>1;<a>a##b##", "__________^__^", [0.25, 1.0])]


def test_texts_with_a_step_token_are_judged_at_that_token(write_rows: Write) -> None:
    rows = [{"input": "1+1=a~bc~", "value": ["+", "-"]}, {"input": "2?~", "value": ["+"]}]
    data = module(write_rows(rows), text="input", labels="value", step_token="~")
    assert read(data) == [("1+1=a~bc~", "_____^__^", [1.0, 0.0]), ("2?~", "__^", [1.0])]


def test_cut_answers_lose_their_last_labels(write_rows: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = module(write_rows([*ROWS, {"prompt": "12345678", "completions": ["a"], "labels": [True]}]), max_length=8)
    assert read(data) == [("1+1=a/bc", "_____^__", [1.0]), ("2?/dd/", "__^__^", [0.0, 1.0])]
    assert "2 of 3 rows were truncated at max_length 8" in caplog.text
    assert "1 of 3 rows have no token to learn and are left out" in caplog.text
    assert "3 of 6 steps lie behind max_length 8" in caplog.text


def test_kept_examples_and_parallel_ones_have_the_same_labels(write_rows: Write, tmp_path: Any) -> None:
    path = write_rows(ROWS * 3)
    expected = read(module(path))
    for _ in range(2):  # made, then read back
        assert read(module(path, cache_dir=tmp_path / "kept", num_proc=2)) == expected
    other = module(path, cache_dir=tmp_path / "kept", separator="#")
    assert read(other)[0][0] == "1+1=a#bc#2#"


def test_batches_have_labels_where_steps_end(write_rows: Write) -> None:
    data = module(write_rows(ROWS), micro_batch_size=2, shuffle=False)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    batch = next(iter(data.train_dataloader()))
    assert (batch.step_tokens, batch.step_sequences, batch.token_denominator) == (5.0, 2.0, 5.0)
    for row, (_, marks, labels) in enumerate(sorted(read(data), key=lambda one: -len(one[0]))):
        row = int((batch.lengths == len(marks)).nonzero()[0, 0])
        assert batch.step_ends[row, : len(marks)].tolist() == [mark == "^" for mark in marks]
        assert batch.labels[row][batch.loss_mask[row]].tolist() == labels
    assert not batch.without_targets().step_ends.any()
    with pytest.raises(ValueError, match="got 1 steps and 0 labels"):
        StepwiseExample(TokenExample([4, 5], [False, True]), [])
    picked = batch.select([1, 0])
    assert torch.equal(picked.labels[0, : batch.labels.shape[1]], batch.labels[1, : picked.labels.shape[1]])


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"labels": [True]}, {}, "row 0, has 3 steps and 1 labels; each step needs one"),
        ({"labels": [1.5, 0.0, 1.0]}, {}, "column 'labels' .* must hold booleans, 0 and 1, .* it holds 1.5"),
        ({"labels": "+"}, {}, "must hold a list of labels, it holds '[+]'"),
        ({"completions": "a b"}, {}, "must hold a list of steps, it holds 'a b'"),
        ({}, {"step_token": "ab", "text": "prompt"}, "step_token must be one token of the tokenizer, 'ab' is"),
        ({}, {"step_token": "~", "text": "prompt"}, "row 0, has 0 steps and 3 labels"),
        ({}, {"text": "prompt"}, "text and step_token belong together"),
        ({}, {"separator": ""}, "separator must have at least one character"),
    ],
)
def test_mistakes_are_named(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module([ROWS[0] | row], **options)


def test_steps_that_the_tokenizer_joins_are_refused() -> None:
    tokenizer = tiny_tokenizer()  # one token for any number of line breaks, as byte-pair encodings have
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(r"\n+"), "~")
    with pytest.raises(ValueError, match="row 0, has a step without a token of its own"):
        module([{"prompt": "1", "completions": ["a", ""], "labels": [True, True]}], tokenizer=tokenizer)
