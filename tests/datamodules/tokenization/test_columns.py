"""Columns decide what kind of data a file holds; errors explain what fits nothing or cannot be trained on.

Covers tokenization/chat.py too, and rows that are token ids.
"""

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
from tiny_models import ROLES, chat_tokenizer

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules import PromptDataModule, SFTDataModule
from rlhfkit.datamodules.tokenization.chat import as_messages, is_chat
from rlhfkit.datamodules.tokenization.examples import split_example

from .. import test_sft

TEMPLATE = ROLES.replace("<a>", "<a>{{ start }}")
CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "system", "value": "S"}, {"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
IMAGE = [{"role": "user", "content": [{"type": "image", "url": "a"}]}]
IDS = [5, 6, 7, 8]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}}
CHAT_READ = ("<u>1;<a>2;$", "________2;$")


def module(data: Any, **options: Any) -> SFTDataModule:
    return test_sft.module(data, tokenizer=chat_tokenizer(TEMPLATE), apply_chat_template=False, **options)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc"}, ("abc$", "abc$")),
        ({"prompt": "1+1=", "completion": "2"}, ("1+1=2$", "____2$")),
        ({"messages": CHAT}, CHAT_READ),
        ({"messages": CHAT, "prompt": "1", "prompt_id": "a7"}, CHAT_READ),
        ({"conversations": SHAREGPT, "id": 7}, ("<s>S;<u>1;<a>2;$", "_____________2;$")),
        ({"conversations": CHAT}, CHAT_READ),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT_READ),
    ],
)
def test_the_columns_tell_the_format(row: Any, expected: tuple[str, str]) -> None:
    assert test_sft.examples(module([row])) == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            r"the given rows has the columns question, answer, which is none of the kinds it could be \(conversation: "
            r".*; token ids.*\)\. Name columns that are called otherwise, e\.g\. prompt='question'$",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "or use PreferenceDataModule or PromptDataModule, which"),
        (
            {"text": "a", "prompt": "b", "completion": "c"},
            "fit several kinds of data: name the one that is meant, prompt='prompt', completion='completion' or text=",
        ),
        ({"conversations": [{"from": "dog", "value": "woof"}]}, "row 0, cannot be read: a turn is from 'dog'"),
        ({"messages": IMAGE}, "'messages' of the given rows, row 0, cannot be read: the content of a .* must be text"),
        ({"messages": CHAT, "tools": [ADD]}, "holds tools, which the chat template does not write"),
        ({"messages": CHAT, "tools": [3]}, "column 'tools' must hold a list of JSON schemas"),
        ({"messages": CHAT, "system": 3}, "column 'system' must hold text"),
        ({"messages": CHAT, "chat_template_kwargs": "[1]"}, "must hold a mapping or JSON text of one"),
        ({"input_ids": IDS, "labels": [6, 7, 8, -100]}, "the label 6 at position 0, where the token is 5: labels are"),
        ({"input_ids": IDS, "labels": [5]}, "column 'labels' of the given rows, row 0, has 1 values for 4 tokens"),
        ({"input_ids": IDS, "loss_mask": [0, 2, 0, 1]}, "must hold 0 and 1"),
        ({"input_ids": "5 6"}, "column 'input_ids' of the given rows, row 0, must hold a list of integers"),
        ({"input_ids": [5, 10_000]}, "has the token 10000, and the tokenizer has 0 to"),
        ({"input_ids": []}, "has no token"),
        ({"input_ids": IDS, "labels": IDS, "loss_mask": [1] * 4}, "which fit several kinds of data"),
    ],
)
def test_what_fits_nothing_or_cannot_be_learned_is_explained(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        test_sft.module([row], tokenizer=chat_tokenizer())


def test_named_columns_win() -> None:
    row = {"question": "a", "answer": "b", "text": "c", "prompt": "d", "completion": "e"}
    assert test_sft.examples(module([row], prompt="question", completion="answer")) == [("ab$", "_b$")]
    assert test_sft.examples(module([row], completion="answer")) == [("db$", "_b$")]
    assert test_sft.examples(module([row], text="question")) == [("a$", "a$")]


def test_columns_that_are_not_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = module([{"text": "a", "url": "b", "id": 1, "images": None}])
    assert test_sft.examples(data) == [("a$", "a$")]
    assert "columns that are not used: id, " in caplog.text


def test_sharegpt_turns_and_content_in_parts_become_messages() -> None:
    assert is_chat(SHAREGPT)
    assert as_messages(SHAREGPT) == [{"role": "system", "content": "S"}, *CHAT]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}]
    assert as_messages(parts) == [{"role": "user", "content": "ab"}]
    assert not is_chat([{"from": "human"}])


def test_arguments_of_a_row_reach_prompts_and_their_lengths() -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    own = '{"start": "x"}'  # a mapping or JSON text
    rows = [{"prompt": f"{i}", "chat_template_kwargs": own if i < 2 else None} for i in range(4)]

    def prompts(size: int, **options: Any) -> list[str]:
        options |= {"tokenizer": tokenizer, "chat_template_kwargs": {"start": "abc"}, "shuffle": False}
        data = PromptDataModule(rows, rollout_batch_size=size, **options)
        data.setup()
        return [tokenizer.decode(prompt.token_ids.tolist()) for prompt in data.prompt_queue().take(size)]

    assert prompts(4) == ["<u>0;<a>x", "<u>1;<a>x", "<u>2;<a>abc", "<u>3;<a>abc"]
    assert prompts(2, max_prompt_length=9, overlong_prompts="drop") == ["<u>0;<a>x", "<u>1;<a>x"]
    with pytest.raises(ValueError, match="2 of 4 prompts of the given rows have more than 9 tokens"):
        prompts(2, max_prompt_length=9)


# --- rows that are token ids already, parts of long ones, and what a row gives to its chat template


def only(row: dict[str, Any], **options: Any) -> TokenExample:
    return test_sft.module([row], **options).examples[0]


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
    data = test_sft.module([{"text": "abcdefg"}, {"text": "h"}], max_length=4, overlong="split")
    assert [text for text, _ in test_sft.examples(data)] == ["abcd", "defg", "g$", "h$"]
    assert data.examples.rows == [0, 0, 0, 1]
    assert "1 of 2 rows were split into parts of max_length 4" in caplog.text


TOOLED = "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}" + ROLES
SUB = {"type": "function", "function": {"name": "sub", "description": "less"}}


def test_tools_of_a_row_are_given_to_its_template() -> None:
    rows = [{"messages": test_sft.CHAT[:2], "tools": tools} for tools in (json.dumps([ADD, SUB]), None, "")]
    found = [text for text, _ in test_sft.examples(test_sft.module(rows, tokenizer=chat_tokenizer(TOOLED)))]
    assert found == ["[addsub]<u>1;<a>ab;$", "<u>1;<a>ab;$", "<u>1;<a>ab;$"]
    as_lists = [{"messages": test_sft.CHAT[:2], "tools": [ADD]}, {"messages": test_sft.CHAT[:2], "tools": [SUB]}]
    shown = "{% if tools %}{{ tools[0].function.keys() | list }}{% endif %}" + ROLES
    first, second = (text for text, _ in test_sft.examples(test_sft.module(as_lists, tokenizer=chat_tokenizer(shown))))
    assert "description" not in first, "a table gives every row the keys of all"
    assert "parameters" not in second


def test_system_and_template_of_a_row_override_those_of_all() -> None:
    chat, own = {"messages": test_sft.CHAT[:2], "chat_template_kwargs": None}, {"chat_template": "*" + ROLES}
    rows = [chat | {"system": "S"}, chat | {"system": None}, chat | {"system": "", "chat_template_kwargs": own}]
    rows.append(chat | {"messages": [{"role": "system", "content": "U"}, *test_sft.CHAT[:2]], "system": None})
    data = test_sft.module(rows, tokenizer=chat_tokenizer(), system="T")
    assert test_sft.examples(data) == [
        ("<s>S;<u>1;<a>ab;$", "_____________ab;$"),
        ("<s>T;<u>1;<a>ab;$", "_____________ab;$"),
        ("*<u>1;<a>ab;$", "_________ab;$"),
        ("<s>U;<u>1;<a>ab;$", "_____________ab;$"),
    ]
