"""The prompts of reinforcement learning and their cursor."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_module import LazyModule
from tiny_models import chat_tokenizer, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from rlhfkit.datamodules import PromptDataModule
from rlhfkit.datamodules.prompts.datamodule import final_answer
from rlhfkit.datamodules.prompts.table import PromptBatches

from ..opened import Write, opened
from .drawing import advance

datasets = LazyModule("datasets")

ROWS = [{"question": f"{i}+1=", "answer": f"One more. #### {i + 1}", "level": i % 3} for i in range(10)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


module = partial(opened, PromptDataModule, prompt="question", answer="answer", rollout_batch_size=4)


def taken(data: PromptDataModule, counts: list[int]) -> list[list[int]]:
    batches = []
    for count in counts:
        batches.append([prompt.index for prompt in data.prompt_queue().take(count)])
        advance(data, count)
    return batches


# -- rows --------------------------------------------------------------------------------------------------------------


def test_gsm8k_row_works_as_it_is(write_rows: Write) -> None:
    """The first row of GSM8K's test set in its own format (Cobbe et al., 2021, arXiv:2110.14168), shortened."""
    row = {
        "question": "Janet's ducks lay 16 eggs per day. How much does she make?",
        "answer": "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18",
    }
    prompt = module(write_rows([row]), rollout_batch_size=1).prompt_queue().take(1)[0]
    assert prompt.answer == "18"
    assert prompt.text == row["question"]
    assert tiny_tokenizer().decode(prompt.token_ids.tolist()) == row["question"]
    answers = {"x\n#### 1,234": "1234", "#### -3.5 ": "-3.5", "plain": "plain", 12: 12, "#### 1 #### (1,2)": "(1,2)"}
    assert {answer: final_answer(answer) for answer in answers} == answers


def test_own_extractor_and_no_answer_column(write_rows: Write) -> None:
    path = write_rows(ROWS)
    assert module(path, answer_extractor=str.upper).prompt_queue().take(1)[0].answer.startswith("ONE MORE.")
    prompt = module(path, answer=None).prompt_queue().take(1)[0]
    assert prompt.answer is None
    assert prompt.metadata["answer"].startswith("One more.")


def test_chat_template_is_used_when_the_tokenizer_has_one(write_rows: Write) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    said = ("user", "a"), ("assistant", "b"), ("user", "c")
    chat = write_rows([{"question": [{"role": role, "content": content} for role, content in said]}], "chat.jsonl")

    def text(path: str = write_rows(ROWS), **options: Any) -> str:
        data = module(path, shuffle=False, **({"tokenizer": tokenizer, "rollout_batch_size": 1} | options))
        prompt = data.prompt_queue().take(1)[0]
        written = tokenizer.decode(prompt.token_ids.tolist())
        assert prompt.text == ("0+1=" if path != chat else written)
        return written

    assert text() == "<user>0+1=<assistant>"
    assert text(system="Think.") == "<system>Think.<user>0+1=<assistant>"
    assert text(apply_chat_template=False) == "0+1="
    assert text(chat, answer=None) == "<user>a<assistant>b<user>c<assistant>"
    with pytest.raises(ValueError, match="row 0, holds chat messages, but the tokenizer has no chat template"):
        text(chat, answer=None, tokenizer=tiny_tokenizer())


@pytest.mark.skipif("not hasattr(datasets, 'Json')", reason="datasets before 4.7 has no column of mixed values")
def test_texts_and_chat_messages_may_be_in_one_column() -> None:
    """Only texts outside the template get the tokenizer's own token in front."""
    tokenizer = chat_tokenizer(TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    rows = [{"question": "a"}, {"question": [{"role": "user", "content": "b"}]}, {"question": "c"}]
    source = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    options = {"tokenizer": tokenizer, "apply_chat_template": False, "shuffle": False, "answer": None}
    for streaming in (False, True):
        data = module(source, streaming=streaming, rollout_batch_size=3, **options)
        found = [tokenizer.decode(prompt.token_ids.tolist()) for prompt in data.prompt_queue().take(3)]
        assert found == ["<unk>a", "<user>b<assistant>", "<unk>c"]


def test_end_of_sequence_that_the_tokenizer_appends_is_taken_off(write_rows: Write) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    prompt = module(write_rows(ROWS), tokenizer=tokenizer, shuffle=False).prompt_queue().take(1)[0]
    assert tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) == ["<pad>", "0", "+", "1", "="]


# -- cursor ------------------------------------------------------------------------------------------------------------


def test_passes_are_shuffled_anew_by_seed_and_pass(write_rows: Write) -> None:
    path = write_rows(ROWS)
    first, second, third = taken(module(path), [10, 10, 10])
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != third
    assert first != taken(module(path, seed=1), [10])[0]
    assert taken(module(path, shuffle=False), [4, 4, 4]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_resumed_run_gets_the_prompts_of_the_straight_run(write_rows: Write, tmp_path: Path) -> None:
    path, stopped = write_rows(ROWS), module(write_rows(ROWS))
    taken(stopped, [3, 10, 4])
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    resumed = PromptDataModule(path, prompt="question", rollout_batch_size=4, tokenizer=tiny_tokenizer())
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))  # before setup or after it
    resumed.setup()
    assert taken(resumed, [7, 9, 2]) == taken(stopped, [7, 9, 2])


def test_changed_data_is_noticed_and_a_new_pass_begins(write_rows: Write, caplog: pytest.LogCaptureFixture) -> None:
    data = module(write_rows(ROWS))
    taken(data, [7])
    state = data.state_dict()
    same = module(write_rows(ROWS, "copy.parquet"))
    same.load_state_dict(state)
    assert not caplog.records
    other = module(write_rows(ROWS[:6], "other.jsonl"))
    other.load_state_dict(state)
    assert "are not those that the checkpoint was saved with (6 rows now)" in caplog.text
    other.set_cursor(state)  # the end of an iteration that was drawn from the old rows, and trained on after a resume
    assert sorted(taken(other, [6])[0]) == list(range(6))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "query"}, r"prompt='query' is not a column of .*; it has question, answer, level"),
        ({"prompt": "level"}, r"column 'level' of .*, row 0, must hold text or a list of chat mes.* holds int: '0'"),
        ({"rollout_batch_size": 11}, "has 10 prompts, fewer than rollout_batch_size 11"),
        (
            {"max_prompt_length": 3},
            r"10 of 10 .* than 3 tokens \(max_pro.* 3\), the longest 4 \(row 0\): raise",
        ),
        ({"max_prompt_length": 3, "overlong_prompts": "drop"}, "none would be left"),
        ({"system": "S"}, "system= is a chat message, but the chat template is not used"),
        ({"apply_chat_template": True}, "apply_chat_template is true, but the tokenizer has no chat template"),
    ],
)
def test_bad_arguments_name_the_value_and_the_cure(write_rows: Write, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(write_rows(ROWS), **options)


def test_overlong_prompts_are_dropped_with_a_count(write_rows: Write, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*ROWS, ROWS[0] | {"question": "1000+1="}, ROWS[5]]
    data = module(write_rows(rows), max_prompt_length=4, overlong_prompts="drop", rollout_batch_size=11)
    assert "1 of 12 prompts" in caplog.text
    assert sorted(taken(data, [11])[0]) == [*range(10), 11]
    with pytest.raises(ValueError, match="cannot take 12 different prompts: there are 11"):
        data.prompt_queue().take(12)


def test_using_it_too_early_says_what_to_do(write_rows: Write) -> None:
    data = PromptDataModule(write_rows(ROWS), prompt="question")
    with pytest.raises(RuntimeError, match=r"call PromptDataModule\.setup\(\) first"):
        data.prompt_queue().take(1)


def test_validation_batches_are_dealt_to_ranks_and_all_ranks_have_equally_many(write_rows: Write) -> None:
    data = module(write_rows(ROWS), validation_data=write_rows(ROWS[:7], "held_out.jsonl"))
    shares = [PromptBatches(data._validation, 3, rank, 2) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 3]
    indices = [[[prompt.index for prompt in batch] for batch in share] for share in shares]
    assert indices == [[[0, 2], [3, 5], [6]], [[1], [4], []]]
