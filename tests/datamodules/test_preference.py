"""Preference data: where the prompt ends, what is cut, what is dropped. Covers unpaired.py too."""

import logging
from functools import partial
from typing import Any

import lightning as L
import pytest
from tiny_models import chat_tokenizer, tiny_tokenizer

from rlhfkit.data.batch import TokenExample
from rlhfkit.data.formats import UnpairedExample
from rlhfkit.data.loaders.steps import ExampleTable
from rlhfkit.datamodules import PreferenceDataModule, UnpairedPreferenceDataModule

from .opened import Write, opened

ROWS = [{"prompt": f"{i}+1=", "chosen": "x" * (i % 4) + str(i + 1), "rejected": "y" * (i % 3 + 1)} for i in range(11)]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


TURNS = [user("1"), assistant("o"), user("2")]


module = partial(opened, PreferenceDataModule)


def shown(answer: TokenExample) -> str:
    """The whole text with everything that is not the answer in front of a bar, and $ for the end."""
    tokens, start = tiny_tokenizer().convert_ids_to_tokens(answer.input_ids), answer.loss_mask.index(True)
    assert all(answer.loss_mask[start:])
    return ("".join(tokens[:start]) + "|" + "".join(tokens[start:])).replace("<eos>", "$")


def read(data: PreferenceDataModule) -> list[tuple[str, str]]:
    pairs = (data.examples[index] for index in range(len(data.examples)))
    return [(shown(pair.chosen), shown(pair.rejected)) for pair in pairs]


def test_answers_and_their_end_of_sequence_token_are_selected(write_rows: Write) -> None:
    data = module(write_rows(ROWS[:2]))
    assert read(data) == [("0+1=|1$", "0+1=|y$"), ("1+1=|x2$", "1+1=|yy$")]
    assert data.examples.lengths == [12, 14]
    assert data.examples.targets == [2, 3]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # explicit chat and text, prompt repeated, implicit, of one turn and of several
        ({"prompt": [user("1")], "chosen": [assistant("x")], "rejected": [assistant("y")]}, "<u>1;<a>|"),
        ({"prompt": "1", "chosen": "x", "rejected": "y"}, "<u>1;<a>|"),
        ({"prompt": "1", "chosen": [user("1"), assistant("x")], "rejected": [user("1"), assistant("y")]}, "<u>1;<a>|"),
        ({"chosen": [user("1"), assistant("x")], "rejected": [user("1"), assistant("y")]}, "<u>1;<a>|"),
        ({"chosen": [*TURNS, assistant("x")], "rejected": [*TURNS, assistant("y")]}, "<u>1;<a>o;<u>2;<a>|"),
    ],
)
def test_prompt_of_a_conversation_is_found(row: dict[str, Any], expected: str) -> None:
    assert read(module([row], tokenizer=chat_tokenizer())) == [(f"{expected}x;$", f"{expected}y;$")]


def test_each_conversation_keeps_an_answer_of_its_own() -> None:
    longer = [user("1"), assistant("x"), user("2"), assistant("z")]
    data = module([{"chosen": longer, "rejected": longer[:2]}], tokenizer=chat_tokenizer())
    assert data.examples[0].rejected.targets == 3  # x;$


def test_implicit_prompt_of_texts_ends_before_white_space_and_has_no_template() -> None:
    row = {"chosen": "Q: 2+2 A: 4", "rejected": "Q: 2+2 A: 5"}
    assert read(module([row], tokenizer=chat_tokenizer())) == [("Q: 2+2 A:| 4$", "Q: 2+2 A:| 5$")]
    with pytest.raises(ValueError, match="no prompt column, so its texts are whole dialogues"):
        module([row], tokenizer=chat_tokenizer(), apply_chat_template=True)


def test_both_answers_have_the_same_prompt_tokens_where_a_token_straddles_the_border() -> None:
    """With a merge "=5" the prompt of "2=5" ends inside a token: "=" is then part of both answers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    merging = Tokenizer(models.BPE({"2": 0, "=": 1, "5": 2, "=5": 3, "<eos>": 4, "7": 5}, [("=", "5")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging, eos_token="<eos>")
    data = module([{"prompt": "2=", "chosen": "5", "rejected": "7"}], tokenizer=tokenizer)
    pair = data.examples[0]
    assert (pair.chosen.input_ids, pair.chosen.loss_mask) == ([0, 3, 4], [False, True, True])
    assert (pair.rejected.input_ids, pair.rejected.loss_mask) == ([0, 1, 5, 4], [False, True, True, True])


def test_truncation_cuts_answers_and_never_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "12345", "chosen": "abcdef", "rejected": "xy"},
        {"prompt": "1", "chosen": "a", "rejected": "b"},
        {"prompt": "12345678", "chosen": "a", "rejected": "b"},  # no room for an answer
        {"prompt": "1", "chosen": "aaaaaaaab", "rejected": "aaaaaaaac"},  # differ behind the limit only
        {"prompt": "1", "chosen": "a", "rejected": "a"},
    ]
    with caplog.at_level(logging.WARNING):
        data = module(rows, max_length=8)
    assert read(data) == [("12345|abc", "12345|xy$"), ("1|a$", "1|b$")]
    assert "1 of 5 pairs were truncated at max_length 8" in caplog.text
    assert "1 of 5 pairs have no answer within max_length 8" in caplog.text
    assert "2 of 5 pairs have the same tokens in both answers" in caplog.text
    assert read(module(rows[:2], max_length=8, overlong="drop")) == [("1|a$", "1|b$")]
    assert "1 of 2 pairs are longer than max_length 8 and dropped" in caplog.text
    with pytest.raises(ValueError, match="row 0, has 12 tokens, more than max_length 8"):
        module(rows, max_length=8, overlong="error")
    with pytest.raises(ValueError, match="none of its 1 rows makes a preference pair"):
        module(rows[:1], max_length=8, overlong="drop")


def test_margins_stay_with_their_pairs() -> None:
    rows = [{"prompt": "1", "chosen": c, "rejected": "b", "margin": m} for c, m in [("a", 1), ("b", 2), ("c", 0.5)]]
    data = module(rows)
    assert [data.examples[i].margin for i in range(2)] == [1.0, 0.5]
    for wrong in ("near", float("nan")):
        with pytest.raises(ValueError, match=f"row 0, must hold a number, it holds .?{wrong}"):
            module([row | {"gap": wrong} for row in ROWS], margin="gap")


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="chosen='best' is not a column"):
        module(ROWS, chosen="best")
    with pytest.raises(ValueError, match="must both hold text or both hold chat messages"):
        module([{"chosen": "a", "rejected": [assistant("b")]}])


# --- single answers with labels

LABELLED = [{"prompt": f"{i}+{i}=", "completion": f"x{2 * i}", "label": i % 3 == 0} for i in range(6)]


def labelled(data: Any, **arguments: Any) -> ExampleTable[UnpairedExample]:
    return opened(UnpairedPreferenceDataModule, data, **{"max_length": 32} | arguments).examples


def texts(examples: ExampleTable[UnpairedExample]) -> list[tuple[str, bool]]:
    each = (examples[index] for index in range(len(examples)))
    return [(shown(example.answer), example.desirable) for example in each]


@pytest.mark.parametrize("words", [("yes", "no"), ("desirable", "undesirable"), ("Chosen", "Rejected"), (1.0, 0.0)])
def test_labels_may_be_numbers_and_words(write_rows: Write, words: tuple[Any, Any]) -> None:
    rows = [row | {"label": words[0] if row["label"] else words[1]} for row in LABELLED]
    assert labelled(write_rows(rows)).values["desirable"] == [row["label"] for row in LABELLED]


@pytest.mark.parametrize("value", ["maybe", 0.7, 2, -1])
def test_a_label_that_is_neither_is_refused(value: Any) -> None:
    row = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError, match=r"column 'label' of .*row 0, must hold a boolean"):
        labelled([row | {"label": value}])
    with pytest.raises(ValueError, match="SFTDataModule, which reads such columns"):
        labelled([row])


def test_labels_stay_with_their_answers_when_rows_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row | {"prompt": "long" * 20} if i in (0, 4) else row for i, row in enumerate(LABELLED)]
    with caplog.at_level(logging.INFO):
        examples = labelled(rows, overlong="drop")
    assert texts(examples) == [(f"{i}+{i}=|x{2 * i}$", i == 3) for i in (1, 2, 3, 5)]
    assert "2 of 6 rows were dropped" in caplog.text
    assert "1 desirable answers of 4" in caplog.text


def test_a_pair_becomes_two_rows() -> None:
    rows = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad" if i else "bad" * 20} for i in range(3)]
    examples = labelled(rows, overlong="drop")
    expected = [("0?|good$", True)]
    expected += [(f"{i}?|{word}$", word == "good") for i in (1, 2) for word in ("good", "bad")]
    assert texts(examples) == expected


def test_sources_are_mixed_and_token_budgets_respected(write_rows: Write) -> None:
    other = [{"prompt": f"{i}?", "chosen": "good", "rejected": "bad"} for i in range(4)]
    weights = {write_rows(LABELLED, "a.jsonl"): 0.5, write_rows(other, "b.jsonl"): 0.5}
    limits = {"max_length": 32, "max_tokens_per_micro_batch": 40}
    data = UnpairedPreferenceDataModule(weights, tokenizer=tiny_tokenizer(), **limits)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=2)
    data.setup()
    batches = list(data.train_dataloader())
    assert all(int(batch.attention_mask.sum()) <= 40 for batch in batches)
    assert [bool(batch.mismatched) for batch in batches] == [index % 2 == 0 for index in range(len(batches))]
