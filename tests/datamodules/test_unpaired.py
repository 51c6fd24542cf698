"""Unpaired preference data: labels and pairs from real files."""

import logging
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from tiny_models import tiny_tokenizer

from rlhfkit import UnpairedPreferenceDataModule
from rlhfkit.data.formats import UnpairedExample
from rlhfkit.data.loaders.steps import ExampleTable

ROWS = [{"prompt": f"{i}+{i}=", "completion": f"x{2 * i}", "label": i % 3 == 0} for i in range(6)]


def opened(data: Any, **arguments: Any) -> ExampleTable[UnpairedExample]:
    module = UnpairedPreferenceDataModule(data, tokenizer=tiny_tokenizer(), **{"max_length": 32} | arguments)
    module.setup()
    assert isinstance(module.examples, ExampleTable)
    return module.examples


def texts(examples: ExampleTable[UnpairedExample]) -> list[tuple[str, bool]]:
    """What the model reads, the completion behind a bar, and the label."""
    tokenizer, found = tiny_tokenizer(), []
    for index in range(len(examples)):
        example = examples[index]
        start = example.answer.loss_mask.index(True)
        parts = example.answer.input_ids[:start], example.answer.input_ids[start:]
        found.append(("|".join(tokenizer.decode(part) for part in parts), example.desirable))
    return found


@pytest.mark.parametrize(
    "words", [("yes", "no"), ("desirable", "undesirable"), ("Chosen", "Rejected"), (1, 0), (1.0, 0.0)]
)
def test_labels_may_be_numbers_and_words(write_rows: Callable[..., str], words: tuple[Any, Any]) -> None:
    rows = [row | {"label": words[0] if row["label"] else words[1]} for row in ROWS]
    assert opened(write_rows(rows)).values["desirable"] == [row["label"] for row in ROWS]


@pytest.mark.parametrize("value", ["maybe", 0.7, 2, -1])
def test_a_label_that_is_neither_is_refused(value: Any) -> None:
    row = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError, match=r"column 'label' of .*row 0, must hold a boolean"):
        opened([row | {"label": value}])
    with pytest.raises(ValueError, match="SFTDataModule, which reads such columns"):
        opened([row])


def test_labels_stay_with_their_answers_when_rows_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row | {"prompt": "long" * 20} if i in (0, 4) else row for i, row in enumerate(ROWS)]
    with caplog.at_level(logging.INFO):
        examples = opened(rows, overlong="drop")
    assert texts(examples) == [(f"{i}+{i}=|x{2 * i}<eos>", i == 3) for i in (1, 2, 3, 5)]
    assert "2 of 6 rows were dropped" in caplog.text
    assert "1 desirable answers of 4" in caplog.text


def test_a_pair_becomes_two_rows() -> None:
    rows = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad" if i else "bad" * 20} for i in range(3)]
    examples = opened(rows, overlong="drop")
    expected = [("0?|good<eos>", True)]
    expected += [(f"{i}?|{word}<eos>", word == "good") for i in (1, 2) for word in ("good", "bad")]
    assert texts(examples) == expected


def test_sources_are_mixed_and_token_budgets_respected(write_rows: Callable[..., str]) -> None:
    other = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad"} for i in range(4)]
    weights = {write_rows(ROWS, "a.jsonl"): 0.5, write_rows(other, "b.jsonl"): 0.5}
    data = UnpairedPreferenceDataModule(
        weights, tokenizer=tiny_tokenizer(), max_length=32, max_tokens_per_micro_batch=40
    )
    data.trainer = L.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2)
    data.setup()
    batches = list(data.train_dataloader())
    assert all(int(batch.attention_mask.sum()) <= 40 for batch in batches)
    assert [bool(batch.mismatched) for batch in batches] == [index % 2 == 0 for index in range(len(batches))]
