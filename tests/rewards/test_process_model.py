"""ProcessModelReward against Transformers' token classifier, and where steps end. Covers ``rewards/models.py``."""

import math
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForTokenClassification

from rlhfkit.data import Prompt, Sample
from rlhfkit.models import load_scalar_model
from rlhfkit.rewards import ProcessModelReward

TEXTS = ("a\nbc\n2", "a\nbc\n2\n", "", "12\n")
REDUCTIONS = {"min": min, "prod": math.prod, "mean": lambda p: sum(p) / len(p), "last": lambda p: p[-1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("process_reward")
    load_scalar_model(str(tiny_model(folder)), stepwise=True, head_std=0.3).save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return str(folder / "judge")


def samples() -> list[Sample]:
    """Answers to one question that has a line break itself; the second was cut before its end-of-sequence token."""
    tokenizer = tiny_tokenizer()
    prompt = Prompt(0, tokenizer("1\n+1=")["input_ids"], "1\n+1=")
    found = []
    for index, text in enumerate(TEXTS):
        ids = [*tokenizer(text)["input_ids"], *([] if index == 1 else [tokenizer.eos_token_id])]
        found.append(Sample(prompt, index, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=text))
    return found


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rewards_are_reduced_probabilities_of_the_token_classifier(folder: str, reduction: Any) -> None:
    classifier: Any = AutoModelForTokenClassification.from_pretrained(folder).eval()
    expected = []
    for text in TEXTS:
        written = "1\n+1=" + (text if text.endswith("\n") else text + "\n")
        with torch.no_grad():
            logits = classifier(input_ids=torch.tensor([tiny_tokenizer()(written)["input_ids"]])).logits[0]
        good = logits.softmax(-1)[:, 1].tolist()
        steps = [good[place] for place, letter in enumerate(written) if letter == "\n" and place > len("1\n+1=") - 1]
        expected.append(REDUCTIONS[reduction](steps))
    reward = ProcessModelReward(folder, reduction=reduction, device="cpu")
    assert reward(samples()) == pytest.approx(expected, abs=1e-5)
    assert expected[0] == expected[1] != expected[2]


def test_a_separator_of_several_tokens_or_within_one_ends_a_step(folder: str) -> None:
    reward = ProcessModelReward(folder, separator="##", device="cpu")
    reward(samples())  # loads
    letters = dict(enumerate(["a", "#", "##", "b##c", ".#", "\N{GREEK SMALL LETTER ALPHA}"]))

    class Letters:
        def batch_decode(self, rows: Any) -> list[str]:
            return ["".join(letters[token] for token in row) for row in rows]

    reward._tokenizer = Letters()
    assert reward._step_ends([0, 1, 1, 0]) == [2]
    assert reward._step_ends([0, 2, 3, 0]) == [1, 2]
    assert reward._step_ends([4, 1, 5, 2]) == [1, 3]
    assert reward._step_ends([0, 4, 0]) == []


def test_mistakes_are_named(folder: str) -> None:
    with pytest.raises(ValueError, match="separator must have at least one character"):
        ProcessModelReward(folder, separator="")
