"""Supervised data: what is learned, what is cut, and the same steps in a real Trainer.

Covers tokenization/examples.py and tokenization/token_examples.py too.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tiny_models import tiny_tokenizer

from rlhfkit.data import TokenBatch, TokenExample, collate_tokens
from rlhfkit.datamodules import SFTDataModule
from rlhfkit.losses import aggregate
from rlhfkit.mesh import Mesh

Write = Callable[..., str]
ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 4) + str(i + 1)} for i in range(11)]
MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "c"},
]


def chat_tokenizer(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


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


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_only_the_assistants_words_are_learned(template: str) -> None:
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(template))
    assert examples(data) == [("<u>1;<a>ab;<u>2;<a>c;$", "________ab;________c;$")]


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_prompt_of_chat_messages_is_not_learned_even_where_the_assistant_spoke(template: str) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    data = module([row], tokenizer=chat_tokenizer(template))
    assert examples(data) == [("<u>1;<a>ab;<u>2;<a>c;$", "___________________c;$")]


def test_text_prompts_are_written_as_in_reinforcement_learning() -> None:
    from rlhfkit.datamodules import PromptDataModule

    options = {"tokenizer": chat_tokenizer(UNMARKED), "system": "S"}
    rows = [{"prompt": "1+1=", "completion": "2"}]
    whole, learned = examples(module(rows, **options))[0]
    prompts = PromptDataModule(rows, rollout_batch_size=1, **options)
    prompts.setup()
    prompt = tiny_tokenizer().decode(prompts.prompt_queue().take(1)[0].token_ids.tolist())
    assert whole == prompt + "2;$"
    assert learned == "_" * len(prompt) + "2;$"
    assert examples(module(rows, apply_chat_template=False, tokenizer=chat_tokenizer(UNMARKED)))[0][0] == "1+1=2$"


def test_template_that_writes_its_own_end_gets_no_second_one() -> None:
    ending = UNMARKED.replace(";{% else %}", "<eos>{% else %}")
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(ending))
    assert examples(data) == [("<u>1;<a>ab$<u>2;<a>c$", "________ab$________c$")]


def test_end_of_sequence_inside_the_marks_counts_when_the_template_writes_more_behind_them() -> None:
    """As chat templates do that write a newline behind the end of a turn."""
    ending = MARKED.replace(";{% endgeneration %}", "<eos>{% endgeneration %};")
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(ending))
    assert examples(data) == [("<u>1;<a>ab$;<u>2;<a>c$;", "________ab$_________c$_")]


def test_more_rows_than_are_tokenised_at_once_keep_their_order() -> None:
    rows = [{"prompt": f"{i}=", "completion": str(i)} for i in range(1100)]
    assert [text for text, _ in examples(module(rows))] == [f"{i}={i}$" for i in range(1100)]


def test_template_that_rewrites_earlier_turns_needs_no_marks() -> None:
    last_only = "{% for m in messages %}{% if loop.last %}*{% endif %}{{ m.content }}{% endfor %}"
    data = module([{"messages": CHAT}], messages="messages", tokenizer=chat_tokenizer(last_only))
    assert examples(data) == [("1ab2*c$", "_ab__c$")]


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
    tokenizer = chat_tokenizer(UNMARKED)
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
            "column 'completion' of the given rows, row 0, must hold text.* int: 3",
        ),
        ([{"prompt": 3, "completion": "a"}], {}, "column 'prompt' of the given rows, row 0, must hold text.* int"),
        ([{"messages": CHAT}], {"messages": "messages"}, "the tokenizer has no chat template"),
        (ROWS, {"max_length": 1}, "at least 2"),
        (ROWS, {"tokenizer": None}, "no tokenizer"),
    ],
)
def test_bad_input_names_the_value_and_the_cure(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(rows, **options)


# -- with the real Trainer ---------------------------------------------------------------------------------------------


class Learner(L.LightningModule):
    """A bigram model; remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch.float64))
        self.tokenizer = tiny_tokenizer()
        self.seen: list[tuple[int, ...]] = []
        self.epochs: list[int] = []

    def _loss(self, batch: TokenBatch) -> torch.Tensor:
        logprobs = self.table[batch.input_ids[:, :-1]].log_softmax(-1)
        token_loss = -logprobs.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return aggregate(token_loss, batch.loss_mask, "token-mean", batch.token_denominator)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> torch.Tensor:
        for row, real in zip(batch.input_ids, batch.attention_mask, strict=True):
            self.seen.append(tuple(row[real].tolist()))
            self.epochs.append(self.current_epoch)
        return self._loss(batch)

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(tmp_path: Path, data: SFTDataModule, *callbacks: Callback, **options: Any) -> tuple[Learner, L.Trainer]:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    ckpt_path = options.pop("ckpt_path", None)
    trainer = L.Trainer(accelerator="cpu", callbacks=list(callbacks), default_root_dir=tmp_path, **(quiet | options))
    learner = Learner()
    trainer.fit(learner, data, ckpt_path=ckpt_path, weights_only=True)
    return learner, trainer


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    data = SFTDataModule(ROWS, micro_batch_size=2)
    learner, trainer = fit(tmp_path, data, max_epochs=3, accumulate_grad_batches=2)
    assert trainer.global_step == 9  # 11 rows in steps of 4
    epochs = [[row for row, epoch in zip(learner.seen, learner.epochs, strict=True) if epoch == e] for e in range(3)]
    whole = Counter(tuple(data.examples[index].input_ids) for index in range(11))
    assert [Counter(epoch) for epoch in epochs] == [whole] * 3
    assert len(set(map(tuple, epochs))) == 3


@pytest.mark.parametrize(("micro", "accumulate"), [(4, 1), (2, 2), (1, 4)])
def test_trained_weights_do_not_depend_on_micro_batches(tmp_path: Path, micro: int, accumulate: int) -> None:
    expected, _ = fit(tmp_path, SFTDataModule(ROWS, micro_batch_size=4), max_epochs=2)
    found, _ = fit(
        tmp_path, SFTDataModule(ROWS, micro_batch_size=micro), max_epochs=2, accumulate_grad_batches=accumulate
    )
    torch.testing.assert_close(found.table, expected.table, rtol=0, atol=1e-12)


def test_validation_loss_is_the_mean_over_all_validation_tokens(tmp_path: Path) -> None:
    held_out = [{"prompt": "1", "completion": "2" * length} for length in (1, 9, 2, 30, 3, 4, 1)]
    learner, _ = fit(tmp_path, SFTDataModule(ROWS, micro_batch_size=4), max_epochs=1)
    whole = module(held_out)
    everything = collate_tokens([whole.examples[index] for index in range(7)])
    exact = float(learner._loss(everything))
    for micro in (1, 3, 11):
        data = SFTDataModule(ROWS, validation_data=held_out, micro_batch_size=micro)
        trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        found = trainer.validate(learner, data, verbose=False)[0]["val/loss"]
        assert found == pytest.approx(exact, rel=1e-6)


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
