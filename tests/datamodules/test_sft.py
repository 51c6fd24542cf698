"""Supervised data: what is learned, what is cut, and the same steps in a real Trainer.

Covers tokenization/examples.py and tokenization/token_examples.py too.
"""

from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tiny_models import chat_tokenizer, tiny_tokenizer

from rlhfkit.data.batch import TokenExample
from rlhfkit.datamodules import SFTDataModule
from rlhfkit.mesh import Mesh

from .opened import Write, opened

ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 4) + str(i + 1)} for i in range(11)]
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
module = partial(opened, SFTDataModule)
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "c"},
]


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
    assert examples(module([{"prompt": "a", "completion": "b<eos>"}])) == [("ab$", "_b$")]
    plain = module([{"text": "abc"}])
    assert examples(plain) == [("abc$", "abc$")]
    assert plain.examples.targets == [3]  # nothing predicts the first token


@pytest.mark.parametrize(
    ("end", "expected", "complete"),
    [
        (";{% endgeneration %}", ("<u>1;<a>ab;<u>2;<a>c;$", "________ab;________c;$"), True),
        # A template that writes its own end gets no second one, and one inside of the marks may have more behind it.
        ("<eos>", ("<u>1;<a>ab$<u>2;<a>c$", "________ab$________c$"), True),
        ("<eos>{% endgeneration %};", ("<u>1;<a>ab$;<u>2;<a>c$;", "________ab$_________c$_"), True),
        # A special token behind the marks is never learned, so the model would talk for ever.
        ("{% endgeneration %}<eos>", ("<u>1;<a>ab$<u>2;<a>c$", "________ab_________c_"), False),
    ],
)
def test_what_ends_a_turn_is_learned(
    end: str, expected: tuple[str, str], complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    marked = MARKED if "endgeneration" in end else MARKED.replace("{% generation %}", "")
    tokenizer = chat_tokenizer(marked.replace(";{% endgeneration %}", end))
    assert examples(module([{"messages": CHAT}], tokenizer=tokenizer)) == [expected]
    assert ("marks leave out the end-of-turn token" in caplog.text) != complete


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
        (ROWS, {"completion": "answer"}, "completion='answer' is not a column of the .*; it has prompt, completion"),
        (ROWS, {"messages": "prompt"}, "column 'prompt' of the given rows, row 0, must hold chat messages"),
        (ROWS, {"messages": "a", "text": "b"}, "not both"),
        ([{"prompt": "a", "completion": 3}], {}, "'completion' .* row 0, must hold text.* int: 3: give rows with text"),
        ([{"messages": CHAT}], {}, "the tokenizer has no chat template"),
        (ROWS, {"tokenizer": None}, "no tokenizer"),
    ],
)
def test_bad_input_names_the_value_and_the_cure(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(rows, **options)


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    """The loader asks the Trainer for its epoch."""
    data = module(ROWS, micro_batch_size=4)
    rows = [tuple(data.examples[index].input_ids) for index in range(11)]

    def epochs(**options: Any) -> list[list[tuple[int, ...]]]:
        data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
        loader, seen = data.train_dataloader(), []
        for epoch in range(3):
            data.trainer.fit_loop.epoch_progress.current.completed = epoch
            batches = islice(loader, options.get("overfit_batches"))
            seen.append([tuple(row[row > 0].tolist()) for batch in batches for row in batch.input_ids])
        return seen

    found = epochs()
    assert [sorted(one) for one in found] == [sorted(rows)] * 3
    assert len(set(map(tuple, found))) == 3
    assert [sorted(one) for one in epochs(overfit_batches=2)] == [sorted(rows[:8])] * 3


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


def test_using_it_too_early_says_what_to_do() -> None:
    data = SFTDataModule(ROWS)
    with pytest.raises(RuntimeError, match=r"pass it to trainer\.fit"):
        data.train_dataloader()
