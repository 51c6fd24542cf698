"""ModelReward against Transformers' classifier, ProcessModelReward against its token classifier; where steps end."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rewards.samples import scored, tokenized
from rlhfkit.data import Sample
from rlhfkit.models import load_scalar_model
from rlhfkit.rewards import ModelReward, ProcessModelReward

TEXTS = ("2", "11", "", "abcdefg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and a reward model with constants."""
    folder = tmp_path_factory.mktemp("model_reward")
    model = load_scalar_model(str(tiny_model(folder / "policy")), head_std=1.0)
    model.config.mean, model.config.std = 0.5, 4.0
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return folder


def by_transformers(folder: Path, rows: Sequence[list[int]]) -> list[float]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.parametrize("tokens", [16384, 12, 1])
def test_scores_are_the_classifiers_on_the_sampled_tokens(folder: Path, tokens: int) -> None:
    given = tokenized(*TEXTS)
    raw = by_transformers(folder, [sample.all_token_ids.tolist() for sample in given])
    reward = ModelReward(str(folder / "reward"), normalized=False, max_tokens_per_forward=tokens, device="cpu")
    assert reward(given) == pytest.approx(raw, abs=1e-5)
    normalized = scored(ModelReward(str(folder / "reward"), device="cpu"), given)
    assert normalized == pytest.approx([(value - 0.5) / 4 for value in raw], abs=1e-5)
    assert [*given[0].reward_parts] == ["reward_model"]
    assert reward([]) == []


def test_a_function_writes_what_another_model_reads(folder: Path) -> None:
    reward = ModelReward(
        str(folder / "reward"), normalized=False, device="cpu", text=lambda s: f"Q {s.prompt.text} A {s.text}"
    )
    given = tokenized(*TEXTS)
    for sample in given:
        sample.token_ids = [127] * len(sample.token_ids)  # nothing of this is read
    rows = [tiny_tokenizer()(f"Q 1+1= A {text}")["input_ids"] for text in TEXTS]
    assert reward(given) == pytest.approx(by_transformers(folder, rows), abs=1e-5)


def test_another_tokenizer_is_found_out(folder: Path) -> None:
    reward = ModelReward(str(folder / "reward"), device="cpu")
    given = tokenized(*TEXTS)
    given[1].text = "eleven"
    with pytest.raises(ValueError, match="another tokenizer than the policy: it reads '11' where 'eleven' was sampled"):
        reward(given)
    given = tokenized(*TEXTS)
    given[2].token_ids = [*given[2].token_ids.tolist()[:-1], 40_000]
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        reward(given)
    given[2].token_ids, given[2].logprobs, given[2].versions = [], [], []
    given[2].prompt.token_ids = []
    with pytest.raises(ValueError, match="a sample of prompt 0 has no token ids: tell ModelReward how to write it"):
        reward(given[2:3])


def test_a_model_without_a_score_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM; needed is a ...ForSequenceClassification with 1 labels"):
        ModelReward(str(folder / "policy"))(tokenized(*TEXTS))


# ---------------------------------------------------------------------- of processes

STEPPED = ("a\nbc\n2", "a\nbc\n2\n", "", "12\n")
REDUCTIONS = {"min": min, "prod": math.prod, "mean": lambda p: sum(p) / len(p), "last": lambda p: p[-1]}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("process_reward")
    load_scalar_model(str(tiny_model(folder)), stepwise=True, head_std=0.3).save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return str(folder / "judge")


def stepped() -> list[Sample]:
    """Answers to one question that has a line break itself; the second was cut before its end-of-sequence token."""
    given = tokenized(*STEPPED, question="1\n+1=")
    given[1] = dataclasses.replace(
        given[1], **{name: getattr(given[1], name)[:-1] for name in ("token_ids", "logprobs", "versions")}
    )
    return given


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rewards_are_reduced_probabilities_of_the_token_classifier(judge: str, reduction: Any) -> None:
    classifier: Any = AutoModelForTokenClassification.from_pretrained(judge).eval()
    expected = []
    for text in STEPPED:
        written = "1\n+1=" + (text if text.endswith("\n") else text + "\n")
        with torch.no_grad():
            logits = classifier(input_ids=torch.tensor([tiny_tokenizer()(written)["input_ids"]])).logits[0]
        good = logits.softmax(-1)[:, 1].tolist()
        steps = [good[place] for place, letter in enumerate(written) if letter == "\n" and place > len("1\n+1=") - 1]
        expected.append(REDUCTIONS[reduction](steps))
    reward = ProcessModelReward(judge, reduction=reduction, device="cpu")
    assert reward(stepped()) == pytest.approx(expected, abs=1e-5)
    assert expected[0] == expected[1] != expected[2]


def test_a_separator_of_several_tokens_or_within_one_ends_a_step(judge: str) -> None:
    reward = ProcessModelReward(judge, separator="##", device="cpu")
    reward(stepped())  # loads
    letters = dict(enumerate(["a", "#", "##", "b##c", ".#", "\N{GREEK SMALL LETTER ALPHA}"]))

    class Letters:
        def batch_decode(self, rows: Any) -> list[str]:
            return ["".join(letters[token] for token in row) for row in rows]

    reward._tokenizer = Letters()
    assert reward._step_ends([0, 1, 1, 0]) == [2]
    assert reward._step_ends([0, 2, 3, 0]) == [1, 2]
    assert reward._step_ends([4, 1, 5, 2]) == [1, 3]
    assert reward._step_ends([0, 4, 0]) == []
