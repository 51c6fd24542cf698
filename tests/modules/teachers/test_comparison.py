"""A teacher with other tokens beside the student, against texts and plain numbers, and however batches are divided."""

from pathlib import Path
from typing import Any

import pytest
import torch
from losses.hybrid_reference import compare, outcomes
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from modules.teachers.teacher_cases import (
    batch_of,
    byte_tokenizer,
    chat_tokenizer,
    model_with,
    pair_tokenizer,
    piece_tokenizer,
)
from rlhfkit import DistillationModule
from rlhfkit.mesh import FORWARD_GROUP, ForwardGroup
from rlhfkit.modules.teachers.comparison import common_tokens
from rlhfkit.modules.teachers.token_texts import TokenTexts

ROWS = [("ab 12", ["34", "5", "12"], ["3", "4", "5", "1", "2"]), ("a", ["6+", "aa"], ["6", "+", "a", "a"])]
"""Prompts, and answers in the tokens of bytes and of characters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with the tokens of bytes, of characters, and of pairs of digits."""
    folder = tmp_path_factory.mktemp("comparison")
    kinds = {"bytes": byte_tokenizer(), "characters": tiny_tokenizer(), "pairs": pair_tokenizer()}
    for seed, (name, tokenizer) in enumerate(kinds.items()):
        model_with(tokenizer, folder / name, seed=seed)
    return folder


def module(folder: Path, student: str, teacher: str, **knobs: Any) -> DistillationModule:
    """A student and its teacher, by their tokens, in memory."""
    made = DistillationModule(str(folder / student), str(folder / teacher), **knobs)
    made.configure_model()
    return made


def by_hand(folder: Path, sides: tuple[str, str], divergence: str, weight: float) -> tuple[float, float, float]:
    """Sums of the divergence, the distance and the cross-entropy over all spans, text by text."""
    models = {name: AutoModelForCausalLM.from_pretrained(folder / name).double() for name in sides}
    tokenizers = {"bytes": byte_tokenizer(), "characters": tiny_tokenizer()}
    total = torch.zeros(3, dtype=torch.float64)
    for prompt, byte_tokens, characters in ROWS:
        read = {"bytes": [*byte_tokens, "(end)"], "characters": [*characters, "(end)"]}
        answers, probabilities = {}, {}
        for name, texts in read.items():
            tokenizer, ends = tokenizers[name], tokenizers[name].eos_token_id
            answers[name] = [ends if text == "(end)" else tokenizer(text)["input_ids"][0] for text in texts]
            ids = torch.tensor([tokenizer(prompt)["input_ids"] + answers[name]])
            with torch.no_grad():
                logits = models[name](ids).logits[0, -len(texts) - 1 : -1]
            probabilities[name] = logits.softmax(-1)
        logs = probabilities[sides[0]].gather(-1, torch.tensor(answers[sides[0]])[:, None]).log()
        total[2] -= logs.sum()
        places = dict.fromkeys(read, 0)
        for span in [*spans(byte_tokens, characters), {"bytes": ["(end)"], "characters": ["(end)"]}]:
            found = {}
            for name, texts in span.items():
                start, stop = places[name], places[name] + len(texts)
                rows, tokens = probabilities[name][start:stop], answers[name][start:stop]
                later = sum(float(row[token].log()) for row, token in zip(rows[1:], tokens[1:], strict=True))
                named = {text_of(tokenizers[name], token): float(value) for token, value in enumerate(rows[0])}
                other = next(other for other in span if other != name)
                found[name] = outcomes(named, texts, later, other_is_one=len(span[other]) == 1)
                places[name] = stop
            total[:2] += torch.tensor(compare(found[sides[0]], found[sides[1]], divergence, weight)).double()
    return tuple(total.tolist())


def text_of(tokenizer: Any, token: int) -> str:
    """What a token writes, or its name."""
    text = tokenizer.decode([token], skip_special_tokens=True)
    if token == tokenizer.eos_token_id:
        return "(end)"
    return text if text and "\N{REPLACEMENT CHARACTER}" not in text else f"<{tokenizer.convert_ids_to_tokens(token)}>"


def spans(first: list[str], second: list[str]) -> list[dict[str, list[str]]]:
    """The pieces at whose ends both have an end; every token of bytes is whole tokens of characters here."""
    left, found = list(second), []
    for token in first:
        found.append({"bytes": [token], "characters": [left.pop(0) for _ in token]})
    return found


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("sides", [("characters", "bytes"), ("bytes", "characters")])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_the_loss_is_that_of_texts_by_hand(
    folder: Path, sides: tuple[str, str], divergence: str, chunk_size: int
) -> None:
    knobs: dict[str, Any] = {"divergence": divergence, "distillation_coef": 0.6, "unmatched_weight": 0.4}
    knobs |= {"teacher_weight": 0.3} if divergence == "jsd" else {}
    made = module(folder, *sides, teacher_reads="text", chunk_size=chunk_size, **knobs).double()
    student = byte_tokenizer() if sides[0] == "bytes" else tiny_tokenizer()
    batch = batch_of([(prompt, "".join(answer)) for prompt, answer, _ in ROWS], student)
    found = made.loss(batch)
    matched, unmatched, cross_entropy = by_hand(folder, sides, divergence, 0.3)
    count = int(batch.loss_mask.sum())
    assert found.metrics["distillation/divergence"].item() == pytest.approx(matched / count, rel=1e-5)
    assert found.metrics["distillation/unmatched"].item() == pytest.approx(unmatched / count, rel=1e-5)
    assert found.metrics["distillation/cross_entropy"].item() == pytest.approx(cross_entropy / count, rel=1e-5)
    assert found.metrics["distillation/aligned_fraction"] == 1
    expected = 0.6 * (matched + 0.4 * unmatched) + 0.4 * cross_entropy
    assert found.loss.item() == pytest.approx(expected / count, rel=1e-5)


def test_gradients_do_not_depend_on_padding_chunks_and_micro_batches(folder: Path) -> None:
    rows = [("a", "34512"), ("ab", "6+6aa12"), ("a", "1")]
    gradients = []
    for knobs, groups in (
        ({"chunk_size": 100}, [rows]),
        ({"chunk_size": 2}, [rows]),
        ({"attention": "eager"}, [rows]),  # padded
        ({}, [rows[:1], rows[1:]]),
    ):
        made = module(folder, "characters", "bytes", teacher_reads="text", **knobs)
        for group in groups:
            batch = batch_of(group, tiny_tokenizer())
            batch.step_tokens = float(batch_of(rows, tiny_tokenizer()).loss_mask.sum())
            made.loss(batch).loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in made.policy.parameters()]))
    assert gradients[0].norm() > 1e-2
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_with_the_same_tokens_it_is_what_it_is_for_token_ids(folder: Path) -> None:
    model_with(pair_tokenizer(), folder / "teacher", seed=9)
    batch = batch_of([("a1", "12345 b"), ("b", "7")], pair_tokenizer())
    for knobs in (
        {},
        {"divergence": "reverse_kl", "temperature": 2.0},
        {"divergence": "jsd", "distillation_coef": 0.3},
    ):
        one, other = (module(folder, "pairs", "teacher", teacher_reads=reads, **knobs) for reads in ("tokens", "text"))
        expected, found = one.loss(batch), other.loss(batch)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
        assert found.metrics["distillation/unmatched"] == 0
        found.loss.backward()
        expected.loss.backward()
        for first, second in zip(other.policy.parameters(), one.policy.parameters(), strict=True):
            torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-6)


def test_tokens_that_only_the_output_layer_has_may_be_sampled_and_are_compared(tmp_path: Path) -> None:
    """Families pad their output layers to more tokens than they have."""
    tiny_model(tmp_path / "student")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "student").config.vocab_size > len(tiny_tokenizer())
    made = module(tmp_path, "student", "student", teacher_reads="text")
    batch = batch_of([("a", "345")], tiny_tokenizer())
    assert made.loss(batch).loss.item() == pytest.approx(0, abs=1e-6)
    batch.input_ids[0, 2] = 120
    found = made.loss(batch)
    assert found.loss.isfinite()
    assert found.metrics["distillation/aligned_fraction"] == 1


def test_ranks_that_compute_forward_passes_together_are_refused(folder: Path) -> None:
    made = module(folder, "characters", "bytes", teacher_reads="text")
    setattr(made.teacher, FORWARD_GROUP, object.__new__(ForwardGroup))
    with pytest.raises(ValueError, match="use a mesh without sequence and tensor ranks"):
        made.loss(batch_of([("a", "3")], tiny_tokenizer()))


def test_half_precision_is_compared_in_float32(folder: Path) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        made = module(folder, "characters", "bytes", teacher_reads="text", distillation_coef=0.5).to(dtype)
        losses.append(made.loss(batch_of([("ab", "34512 aa")], tiny_tokenizer())).loss)
    assert losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-2)


def test_a_batch_without_targets_has_no_loss_and_a_gradient(folder: Path) -> None:
    made = module(folder, "characters", "bytes", teacher_reads="text")
    loss = made.loss(batch_of([("a", "34512")], tiny_tokenizer()).without_targets()).loss
    loss.backward()
    assert loss == 0
    assert all(weight.grad.eq(0).all() for weight in made.policy.parameters())


def pairs(student: Any, teacher: Any, end: int | None) -> set[tuple[str, str]]:
    """Names of the common tokens."""
    found = common_tokens(TokenTexts(student), TokenTexts(teacher), end).T.tolist()
    names = (side.convert_ids_to_tokens(ids) for side, ids in zip((student, teacher), found, strict=True))
    return set(zip(*names, strict=True))


def test_tokens_are_common_if_they_write_the_same_after_other_text() -> None:
    pieces, plain = piece_tokenizer(), byte_tokenizer()
    found = pairs(pieces, plain, plain.eos_token_id)
    assert {("\u2581", "\u0120"), ("H", "H"), ("</s>", "<end>")} <= found
    assert ("<0x48>", "H") not in found  # it writes H too
    assert not any(first.startswith("<0xF0") for first, _ in found)  # a part of a character has another name
    assert len({first for first, _ in found}) == len({second for _, second in found}) == len(found)


@pytest.mark.parametrize("make", [byte_tokenizer, chat_tokenizer, pair_tokenizer, piece_tokenizer, tiny_tokenizer])
def test_all_tokens_of_one_tokenizer_are_common(make: Any) -> None:
    tokenizer = make()
    found = common_tokens(TokenTexts(tokenizer), TokenTexts(tokenizer), tokenizer.eos_token_id)
    assert found.tolist() == [[token, token] for token in range(len(tokenizer))]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"teacher_reads": "text", "top_k": 5}, "leave out top_k"),
        ({"teacher_reads": "text", "top_k": 5, "precompute_teacher": True}, "leave out top_k"),
        ({"teacher_reads": "aloud"}, "teacher_reads"),
        ({"unmatched_weight": 0.5}, "unmatched_weight"),
        ({"unmatched_weight": -1.0, "teacher_reads": "text"}, "unmatched_weight"),
    ],
)
def test_what_cannot_be_compared_is_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillationModule("unused", "unused", **knobs)
