"""Prompts that would stop a run when they are drawn are found before it begins, with row and file.

Covers columns.py.
"""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rl_runs import digits, setup_run
from tiny_models import chat_tokenizer, tiny_tokenizer

from rlhfkit import PreferenceDataModule, PromptDataModule, RolloutCallback, SamplingSpec, SFTDataModule, Validation

from ..opened import Write, opened

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}!{% endif %}{% endfor %}"


module = partial(opened, PromptDataModule, rollout_batch_size=2)


def test_an_empty_prompt_is_found_at_the_start_with_row_and_file(write_rows: Write) -> None:
    rows = [{"prompt": f"{i}+1="} for i in range(30)]
    rows[23]["prompt"] = ""
    with pytest.raises(ValueError, match=r"column 'prompt' of .*data\.jsonl, row 23, is a prompt without a token"):
        module(write_rows(rows))
    with pytest.raises(ValueError, match=r"column 'prompt' of .*data\.jsonl, row 23"):
        module(write_rows([{"prompt": "1+1="}] * 4), validation_data=write_rows(rows))


def test_a_prompt_without_room_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": ""} for i in range(8)]
    rows[5]["prompt"] = "1+" * 254 + "1="
    message = r"1 of 8 prompts .* more than 508 tokens \(the model's context of 512 less .*, the longest 510 \(row 5\)"
    for overlong, error in (("error", pytest.raises(ValueError, match=message)), ("drop", nullcontext())):
        trainer, module, data, rollouts = setup_run(
            tmp_path,
            rollouts=RolloutCallback(digits, sampling=SamplingSpec(group_size=2, max_new_tokens=4)),
            data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4, "overlong_prompts": overlong},
            max_epochs=1,
        )
        data.data = rows
        with error:
            trainer.fit(module, data)
        assert bool(rollouts.samples) == (overlong == "drop")


def test_validation_needs_room_for_its_own_answers_only(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}] * 8
    for training, validation, error in ((600, 8, None), (8, 600, "no prompt has room: the model's context of 512")):
        trainer, module, data, _ = setup_run(
            tmp_path / f"{training}",
            rollouts=RolloutCallback(
                digits,
                sampling=SamplingSpec(group_size=2, max_new_tokens=training),
                parts=[Validation(SamplingSpec(group_size=1, max_new_tokens=validation))],
            ),
            data_arguments={"rollout_batch_size": 4, "micro_batch_size": 4},
        )
        data.data, data.validation_data = rows, rows
        with nullcontext() if error is None else pytest.raises(ValueError, match=error):
            trainer.validate(module, data)
        with pytest.raises(ValueError, match="no prompt has room: the model's context of 512"):
            trainer.fit(module, data)


def test_a_token_that_the_model_does_not_know_is_named(write_rows: Write) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    data = module(write_rows([{"prompt": "1+1="}, {"prompt": "2<tool>"}]), tokenizer=tokenizer)
    data.check_prompts(longest=100, reason="the test", vocabulary=len(tokenizer))
    with pytest.raises(ValueError, match=r"row 1, has the token 99 \('<tool>'\), .* knows the tokens 0 to 98"):
        data.check_prompts(longest=100, reason="the test", vocabulary=99)


# --- a text of the data is a text, unless it is to be more


def test_chat_messages_of_prompts_are_escaped_and_the_templates_own_tokens_stay(
    write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    row = {"prompt": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b<eos>c<e<eos>os>"}]}
    with caplog.at_level(logging.WARNING):
        prompt = module(write_rows([row, row]), tokenizer=tokenizer).prompt_queue().take(1)[0]
    assert tokenizer.decode(prompt.token_ids.tolist()) == "a<eos>b< eos>c<e< eos>os>!"
    assert prompt.token_ids.tolist().count(tokenizer.eos_token_id) == 1
    assert "special_tokens_in_text='keep'" in caplog.text


def test_plain_text_of_prompts_keeps_its_tokens_unless_told_otherwise(write_rows: Write) -> None:
    path, tokenizer = write_rows([{"prompt": "a<eos>b"}] * 2), tiny_tokenizer()
    assert tokenizer.eos_token_id in module(path).prompt_queue().take(1)[0].token_ids
    escaped = module(path, special_tokens_in_text="escape").prompt_queue().take(1)[0]
    assert tokenizer.decode(escaped.token_ids.tolist()) == "a< eos>b"
    with pytest.raises(ValueError, match=r"row 0, has the control token '<eos>' in its text"):
        module(path, special_tokens_in_text="refuse")


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        (SFTDataModule, {"messages": [{"role": "user", "content": "b<eos>"}, {"role": "assistant", "content": "c"}]}),
        (SFTDataModule, {"prompt": "b<eos>", "completion": "c"}),
        (PreferenceDataModule, {"prompt": "b<eos>", "chosen": "c", "rejected": "d"}),
    ],
)
def test_special_tokens_of_supervised_texts_are_escaped(write_rows: Write, kind: Any, row: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    path = write_rows([row] * 2)

    def read(**options: Any) -> Any:
        one = opened(kind, path, tokenizer=tokenizer, max_length=64, **options).examples[0]
        return tokenizer.decode(getattr(one, "chosen", one).input_ids)

    assert read() == "b< eos>!c<eos>"
    assert read(special_tokens_in_text="keep") == "b<eos>!c<eos>"
    with pytest.raises(ValueError, match=r"data\.jsonl, row 0, has the control token '<eos>' in its text"):
        read(special_tokens_in_text="refuse")
