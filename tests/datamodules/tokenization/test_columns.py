"""Columns decide what kind of data a file holds; errors explain what fits nothing or cannot be trained on.

Covers tokenization/chat.py too.
"""

import logging
from typing import Any

import pytest
from tiny_models import ROLES, chat_tokenizer

from rlhfkit.datamodules import PromptDataModule, SFTDataModule
from rlhfkit.datamodules.tokenization.chat import as_messages, is_chat

from .. import test_sft

TEMPLATE = ROLES.replace("<a>", "<a>{{ start }}")
CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "system", "value": "S"}, {"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}]
CHAT_READ = ("<u>1;<a>2;$", "________2;$")


def module(data: Any, **options: Any) -> SFTDataModule:
    return test_sft.module(data, tokenizer=chat_tokenizer(TEMPLATE), apply_chat_template=False, **options)


def read(data: SFTDataModule, index: int = 0) -> tuple[str, str]:
    return test_sft.examples(data)[index]


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
    assert read(module([row])) == expected


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
        ({"text": "a", "image": "cat.png"}, "row 0 has a column 'image', and the model reads text only.*remove it"),
        ({"conversations": [{"from": "dog", "value": "woof"}]}, "row 0, cannot be read: a turn is from 'dog'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
            "column 'messages' of the given rows, row 0, cannot be read: the content of a chat message must be text",
        ),
    ],
)
def test_what_fits_nothing_is_explained(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module([row])


def test_columns_that_are_not_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read(module([{"text": "a", "url": "b", "id": 1, "images": None}])) == ("a$", "a$")
    assert "columns that are not used: id, " in caplog.text


def test_sharegpt_turns_and_content_in_parts_become_messages() -> None:
    assert is_chat(SHAREGPT)
    assert as_messages(SHAREGPT) == [{"role": "system", "content": "S"}, *CHAT]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}]
    assert as_messages(parts) == [{"role": "user", "content": "ab"}]
    assert not is_chat([{"from": "human"}])


def test_a_row_can_have_arguments_of_its_own_for_the_template() -> None:
    rows = [
        {"prompt": CHAT[:1], "completion": CHAT[1:], "chat_template_kwargs": {"start": "x", "other": None}},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "chat_template_kwargs": None},
    ]
    template = TEMPLATE.replace(";{% endfor", ";{% if m.role == 'assistant' %}{{ start }}{% endif %}{% endfor")
    data = test_sft.module(rows, tokenizer=chat_tokenizer(template), chat_template_kwargs={"start": "y"})
    assert [read(data, index)[0] for index in (0, 1)] == ["<u>1;<a>2;x$", "<u>1;<a>2;y$"]


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
