"""ModelReward against Transformers' classifier, ProcessModelReward against its token classifier; where steps end."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhfkit.data import Prompt, Sample
from rlhfkit.models import load_scalar_model
from rlhfkit.rewards import ModelReward, ProcessModelReward
from rlhfkit.rewards.base import score_samples

TEXTS = ("2", "11", "", "abcdefg")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and a reward model with constants."""
    folder = tmp_path_factory.mktemp("model_reward")
    model = load_scalar_model(str(tiny_model(folder / "policy")), head_std=1.0)
    model.config.mean, model.config.std = 0.5, 4.0
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return folder


def samples(texts: Sequence[str] = TEXTS) -> list[Sample]:
    """Answers to one question, each with its end-of-sequence token."""
    tokenizer = tiny_tokenizer()
    prompt = Prompt(0, tokenizer("1+1=")["input_ids"], "1+1=")
    found = []
    for index, text in enumerate(texts):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        found.append(Sample(prompt, index, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=text))
    return found


def by_transformers(folder: Path, rows: Sequence[list[int]]) -> list[float]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.parametrize("tokens", [16384, 12, 1])
def test_scores_are_the_classifiers_on_the_sampled_tokens(folder: Path, tokens: int) -> None:
    given = samples()
    raw = by_transformers(folder, [sample.all_token_ids.tolist() for sample in given])
    reward = ModelReward(str(folder / "reward"), normalized=False, max_tokens_per_forward=tokens, device="cpu")
    assert reward(given) == pytest.approx(raw, abs=1e-5)
    score_samples(ModelReward(str(folder / "reward"), device="cpu"), given)
    assert [sample.reward for sample in given] == pytest.approx([(value - 0.5) / 4 for value in raw], abs=1e-5)
    assert [*given[0].reward_parts] == ["reward_model"]
    assert reward([]) == []


def test_a_function_writes_what_another_model_reads(folder: Path) -> None:
    reward = ModelReward(
        str(folder / "reward"), normalized=False, device="cpu", text=lambda s: f"Q {s.prompt.text} A {s.text}"
    )
    given = samples()
    for sample in given:
        sample.token_ids = [127] * len(sample.token_ids)  # nothing of this is read
    rows = [tiny_tokenizer()(f"Q 1+1= A {text}")["input_ids"] for text in TEXTS]
    assert reward(given) == pytest.approx(by_transformers(folder, rows), abs=1e-5)


def test_another_tokenizer_is_found_out(folder: Path) -> None:
    reward = ModelReward(str(folder / "reward"), device="cpu")
    given = samples()
    given[1].text = "eleven"
    with pytest.raises(ValueError, match="another tokenizer than the policy: it reads '11' where 'eleven' was sampled"):
        reward(given)
    given = samples()
    given[2].token_ids = [*given[2].token_ids.tolist()[:-1], 40_000]
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        reward(given)
    prompt = Prompt(3, [], "1+1=")
    with pytest.raises(ValueError, match="a sample of prompt 3 has no token ids: tell ModelReward how to write it"):
        reward([Sample(prompt, 0, [], [], [], "stop", text="")])


def test_only_trained_reward_models_are_taken(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM; needed is a ...ForSequenceClassification with 1 labels"):
        ModelReward(str(folder / "policy"))(samples())
    with pytest.raises(
        ValueError, match="dtype must be the name of a torch type such as 'bfloat16', got 'half precision'"
    ):
        ModelReward("unused", dtype="half precision")


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
    tokenizer = tiny_tokenizer()
    prompt = Prompt(0, tokenizer("1\n+1=")["input_ids"], "1\n+1=")
    found = []
    for index, text in enumerate(STEPPED):
        ids = [*tokenizer(text)["input_ids"], *([] if index == 1 else [tokenizer.eos_token_id])]
        found.append(Sample(prompt, index, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=text))
    return found


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


def test_mistakes_are_named(judge: str) -> None:
    with pytest.raises(ValueError, match="separator must have at least one character"):
        ProcessModelReward(judge, separator="")
