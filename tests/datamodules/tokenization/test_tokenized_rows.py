"""Rows that are token ids already, parts of long ones, and what a row gives to its chat template.

Covers tokenization/chat.py too.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from tiny_models import ROLES, chat_tokenizer

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules import SFTDataModule
from rlhfkit.datamodules.tokenization.examples import split_example

from ..test_sft import CHAT, examples, module

IDS = [5, 6, 7, 8]


def only(row: dict[str, Any], **options: Any) -> TokenExample:
    return module([row], **options).examples[0]


@pytest.mark.parametrize(
    ("more", "mask"),
    [
        ({}, [1, 1, 1, 1]),
        ({"labels": [-100, -100, 7, 8]}, [0, 0, 1, 1]),
        ({"loss_mask": [0, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"completion_mask": [False, False, False, True]}, [0, 0, 0, 1]),
        ({"assistant_masks": [0, 0, 1, 1]}, [0, 0, 1, 1]),
    ],
)
def test_token_ids_are_taken_as_they_are(more: dict[str, Any], mask: list[int]) -> None:
    assert only({"input_ids": IDS, **more}) == TokenExample(IDS, [*map(bool, mask)])


def test_padding_is_left_out_and_columns_may_have_other_names() -> None:
    row = {"ids": [0, 0, *IDS], "target": [-100, -100, 5, -100, 7, 8], "attention_mask": [0, 0, 1, 1, 1, 1]}
    assert only(row, input_ids="ids", labels="target") == TokenExample(IDS, [True, False, True, True])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": IDS, "labels": [6, 7, 8, -100]}, "the label 6 at position 0, where the token is 5: labels are"),
        ({"input_ids": IDS, "labels": [5]}, "column 'labels' of the given rows, row 0, has 1 values for 4 tokens"),
        ({"input_ids": IDS, "loss_mask": [0, 2, 0, 1]}, "must hold 0 and 1"),
        ({"input_ids": "5 6"}, "column 'input_ids' of the given rows, row 0, must hold a list of integers"),
        ({"input_ids": [5, 10_000]}, "has the token 10000, and the tokenizer has 0 to"),
        ({"input_ids": []}, "has no token"),
        ({"input_ids": IDS, "labels": IDS, "loss_mask": [1] * 4}, "which fit several kinds of data"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_its_row(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        only(row)


def test_a_split_document_is_learned_once_token_for_token() -> None:
    for count in range(1, 30):
        for length in (2, 3, 7):
            whole = TokenExample(list(range(100, 100 + count)), [i % 3 != 1 for i in range(count)])
            parts = split_example(whole, length)
            each = (zip(pairwise(part.input_ids), part.loss_mask[1:], strict=True) for part in parts)
            learned = [pair for part in each for pair, mark in part if mark]
            expected = [(99 + i, 100 + i) for i in range(1, count) if i % 3 != 1]
            assert learned == expected, "each token once, after the token before it"
            assert [len(part.input_ids) for part in parts[:-1]] == [length] * (len(parts) - 1)
            assert len(parts[-1].input_ids) <= length


def test_long_rows_are_split_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    data = module([{"text": "abcdefg"}, {"text": "h"}], max_length=4, overlong="split")
    assert [text for text, _ in examples(data)] == ["abcd", "defg", "g$", "h$"]
    assert data.examples.rows == [0, 0, 0, 1]
    assert "1 of 2 rows were split into parts of max_length 4" in caplog.text


TOOLED = "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}" + ROLES
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "less"}}


def test_tools_of_a_row_are_given_to_its_template() -> None:
    rows = [{"messages": CHAT[:2], "tools": tools} for tools in (json.dumps([ADD, SUB]), None, "")]
    found = [text for text, _ in examples(module(rows, tokenizer=chat_tokenizer(TOOLED)))]
    assert found == ["[addsub]<u>1;<a>ab;$", "<u>1;<a>ab;$", "<u>1;<a>ab;$"]
    as_lists = [{"messages": CHAT[:2], "tools": [ADD]}, {"messages": CHAT[:2], "tools": [SUB]}]
    shown = "{% if tools %}{{ tools[0].function.keys() | list }}{% endif %}" + ROLES
    first, second = (text for text, _ in examples(module(as_lists, tokenizer=chat_tokenizer(shown))))
    assert "description" not in first, "a table gives every row the keys of all"
    assert "parameters" not in second


def test_system_and_template_of_a_row_override_those_of_all() -> None:
    rows = [
        {"messages": CHAT[:2], "system": "S", "chat_template_kwargs": None},
        {"messages": CHAT[:2], "system": None, "chat_template_kwargs": None},
        {"messages": CHAT[:2], "system": "", "chat_template_kwargs": {"chat_template": "*" + ROLES}},
        {"messages": [{"role": "system", "content": "U"}, *CHAT[:2]], "system": None, "chat_template_kwargs": None},
    ]
    data = module(rows, tokenizer=chat_tokenizer(), system="T")
    assert examples(data) == [
        ("<s>S;<u>1;<a>ab;$", "_____________ab;$"),
        ("<s>T;<u>1;<a>ab;$", "_____________ab;$"),
        ("*<u>1;<a>ab;$", "_________ab;$"),
        ("<s>U;<u>1;<a>ab;$", "_____________ab;$"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": [ADD]}, "holds tools, which the chat template does not write"),
        ({"tools": [3]}, "column 'tools' must hold a list of JSON schemas"),
        ({"system": 3}, "column 'system' must hold text"),
        ({"chat_template_kwargs": "[1]"}, "must hold a mapping or JSON text of one"),
    ],
)
def test_what_a_template_cannot_use_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SFTDataModule([{"messages": CHAT[:2], **row}], tokenizer=chat_tokenizer()).setup()
