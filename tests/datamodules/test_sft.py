"""Supervised data: what is learned, what is cut, and the same steps in a real Trainer.

Covers tokenization/examples.py and tokenization/token_examples.py too.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tiny_models import ROLES, chat_tokenizer, tiny_tokenizer

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules import SFTDataModule
from rlhfkit.mesh import Mesh

Write = Callable[..., str]
ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 4) + str(i + 1)} for i in range(11)]
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "c"},
]


def module(data: Any, **options: Any) -> SFTDataModule:
    made = SFTDataModule(data, **({"tokenizer": tiny_tokenizer()} | options))
    made.setup("fit")
    return made


def read(example: TokenExample) -> tuple[str, str]:
    """The whole text, and what is learned of it, ``_`` for all else."""
    tokens = ["$" if token == "<eos>" else token for token in tiny_tokenizer().convert_ids_to_tokens(example.input_ids)]
    learned = "".join(token if mark else "_" for token, mark in zip(tokens, example.loss_mask, strict=True))
    return "".join(tokens), learned


def examples(data: SFTDataModule) -> list[tuple[str, str]]:
    return [read(data.examples[index]) for index in range(len(data.examples))]


def test_completion_and_end_of_sequence_are_learned(write_rows: Write) -> None:
    data = module(write_rows(ROWS[:2]))
    assert examples(data) == [("0+1=1$", "____1$"), ("1+1=x2$", "____x2$")]
    assert data.examples.lengths == [6, 7]
    assert data.examples.targets == [2, 3]


def test_token_that_straddles_the_border_is_learned() -> None:
    """With a merge "=5" the prompt ends inside a token: it is part of the answer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merging = Tokenizer(models.BPE({"2": 0, "=": 1, "5": 2, "=5": 3, "<eos>": 4}, [("=", "5")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<eos>")
    data = module([{"prompt": "2=", "completion": "5"}], tokenizer=tokenizer)
    assert data.examples[0] == TokenExample([0, 3, 4], [False, True, True])


def test_end_of_sequence_is_there_once() -> None:
    data = module([{"prompt": "a", "completion": "b<eos>"}])
    assert examples(data) == [("ab$", "_b$")]


def test_plain_text_is_learned_entirely() -> None:
    data = module([{"text": "abc"}], text="text")
    assert examples(data) == [("abc$", "abc$")]
    assert data.examples.targets == [3]  # nothing predicts the first token


@pytest.mark.parametrize("template", [MARKED, ROLES])
def test_only_the_assistants_words_are_learned(template: str) -> None:
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(template))
    assert examples(data) == [("<u>1;<a>ab;<u>2;<a>c;$", "________ab;________c;$")]


@pytest.mark.parametrize("template", [MARKED, ROLES])
def test_prompt_of_chat_messages_is_not_learned_even_where_the_assistant_spoke(template: str) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    data = module([row], tokenizer=chat_tokenizer(template))
    assert examples(data) == [("<u>1;<a>ab;<u>2;<a>c;$", "___________________c;$")]


def test_text_prompts_are_written_as_in_reinforcement_learning() -> None:
    from rlhfkit.datamodules import PromptDataModule

    options = {"tokenizer": chat_tokenizer(), "system": "S"}
    rows = [{"prompt": "1+1=", "completion": "2"}]
    whole, learned = examples(module(rows, **options))[0]
    prompts = PromptDataModule(rows, rollout_batch_size=1, **options)
    prompts.setup()
    prompt = tiny_tokenizer().decode(prompts.prompt_queue().take(1)[0].token_ids.tolist())
    assert whole == prompt + "2;$"
    assert learned == "_" * len(prompt) + "2;$"
    assert examples(module(rows, apply_chat_template=False, tokenizer=chat_tokenizer()))[0][0] == "1+1=2$"


def test_template_that_writes_its_own_end_gets_no_second_one() -> None:
    ending = MARKED.replace("{% generation %}", "").replace(";{% endgeneration %}", "<eos>")
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(ending))
    assert examples(data) == [("<u>1;<a>ab$<u>2;<a>c$", "________ab$________c$")]


def test_end_of_sequence_inside_the_marks_counts_when_the_template_writes_more_behind_them() -> None:
    """As chat templates do that write a newline behind the end of a turn."""
    ending = MARKED.replace(";{% endgeneration %}", "<eos>{% endgeneration %};")
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(ending))
    assert examples(data) == [("<u>1;<a>ab$;<u>2;<a>c$;", "________ab$_________c$_")]


def test_marks_that_leave_out_what_ends_a_turn_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A marker behind the marks that is a special token: it is never learned, so the model would talk for ever."""
    tokenizer = chat_tokenizer(MARKED.replace(";{% endgeneration %}", "{% endgeneration %}<eos>"))
    data = module([{"messages": CHAT}], messages="messages", tokenizer=tokenizer)
    assert examples(data) == [("<u>1;<a>ab$<u>2;<a>c$", "________ab_________c_")]
    assert "marks leave out the end-of-turn token" in caplog.text
    caplog.clear()
    module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(MARKED))
    assert "marks leave out" not in caplog.text


def test_system_message_is_added_once() -> None:
    tokenizer = chat_tokenizer()
    with_system = [{"role": "system", "content": "T"}, *CHAT[:2]]
    rows = [{"messages": CHAT[:2]}, {"messages": with_system}]
    whole = [text for text, _ in examples(module(rows, messages="messages", tokenizer=tokenizer, system="S"))]
    assert whole == ["<s>S;<u>1;<a>ab;$", "<s>T;<u>1;<a>ab;$"]


def test_overlong_examples_are_cut_dropped_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "ab", "completion": "cdefgh"},  # cut
        {"prompt": "abcdefgh", "completion": "i"},  # nothing left to learn
        {"prompt": "a", "completion": "b"},
    ]
    assert examples(module(rows, max_length=5)) == [("abcde", "__cde"), ("ab$", "_b$")]
    assert "2 of 3 rows were truncated at max_length 5" in caplog.text
    assert "1 of 3 rows have no token to learn" in caplog.text
    assert examples(module(rows, max_length=5, overlong="drop")) == [("ab$", "_b$")]
    assert "2 of 3 rows were dropped" in caplog.text
    with pytest.raises(ValueError, match="row 0, has 9 tokens, more than max_length 5"):
        module(rows, max_length=5, overlong="error")
    with pytest.raises(ValueError, match="none of its 1 rows has a token to learn"):
        module(rows[1:2], max_length=5)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            ROWS,
            {"completion": "answer"},
            "completion='answer' is not a column of the given rows; it has prompt, completion",
        ),
        (ROWS, {"text": "body"}, "text='body' is not a column"),
        (ROWS, {"messages": "prompt"}, "column 'prompt' of the given rows, row 0, must hold chat messages"),
        (ROWS, {"messages": "a", "text": "b"}, "not both"),
        (
            [{"prompt": "a", "completion": 3}],
            {},
            "column 'completion' of the given rows, row 0, must hold text.* int: 3: give rows with text .*Value",
        ),
        ([{"prompt": 3, "completion": "a"}], {}, "column 'prompt' of the given rows, row 0, must hold text.* int"),
        ([{"messages": CHAT}], {"messages": "messages"}, "the tokenizer has no chat template"),
        (ROWS, {"tokenizer": None}, "no tokenizer"),
    ],
)
def test_bad_input_names_the_value_and_the_cure(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(rows, **options)


# -- with the real Trainer ---------------------------------------------------------------------------------------------


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    """The loader asks the Trainer for its epoch."""
    data = module(ROWS, micro_batch_size=4)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loader, epochs = data.train_dataloader(), []
    for epoch in range(3):
        data.trainer.fit_loop.epoch_progress.current.completed = epoch
        epochs.append([tuple(row[row > 0].tolist()) for batch in loader for row in batch.input_ids])
    assert [sorted(one) for one in epochs] == [sorted(tuple(data.examples[index].input_ids) for index in range(11))] * 3
    assert len(set(map(tuple, epochs))) == 3


def test_the_trainer_overfits_the_same_rows_in_each_epoch() -> None:
    data = module(ROWS, micro_batch_size=2)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, overfit_batches=2)
    loader = data.train_dataloader()
    data.trainer.fit_loop.epoch_progress.current.completed = 3
    rows = [tuple(row[row > 0].tolist()) for batch in islice(loader, 2) for row in batch.input_ids]
    assert sorted(rows) == sorted(tuple(data.examples[index].input_ids) for index in range(4))


def test_optimizer_steps_that_change_their_size_are_refused() -> None:
    data = module(ROWS)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[GradientAccumulationScheduler({0: 4})])
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler .* give Trainer\(accumulate_grad_batches="):
        data.train_dataloader()


def test_a_row_may_be_as_long_as_the_ranks_that_divide_it_have_room_for() -> None:
    options = {"tokenizer": tiny_tokenizer(), "max_length": 20, "max_tokens_per_micro_batch": 10}
    data = SFTDataModule([{"text": "a" * 19}], **options)
    with pytest.raises(ValueError, match=r"at least max_length 20, so that each sequence fits, got 10$"):
        data.setup("fit")
    trainer = L.Trainer(accelerator="cpu", logger=False)
    data.trainer = trainer
    trainer.strategy.mesh = Mesh(0, 4, tensor=4)  # all of them compute all tokens
    with pytest.raises(ValueError, match=r"got 10$"):
        data.prepare_data()
    trainer.strategy.mesh = Mesh(0, 2, sequence=2)
    data.setup("fit")
    assert data.examples.lengths == [20]
    long = SFTDataModule([{"text": "a"}], **options | {"max_length": 21})
    long.trainer = trainer
    with pytest.raises(ValueError, match=r"max_length 21, .* got 10 \* sequence_parallel_size 2 = 20"):
        long.setup("fit")


def test_using_it_too_early_says_what_to_do() -> None:
    data = SFTDataModule(ROWS)
    with pytest.raises(RuntimeError, match=r"pass it to trainer\.fit"):
        data.train_dataloader()
