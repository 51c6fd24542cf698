"""A teacher with other tokens: spans of the same text, the chain rule by hand, and learning from a known teacher.

Covers token_texts.py.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_runs import digit_teacher, setup_run
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from modules.teachers.teacher_cases import (
    batch_of,
    byte_tokenizer,
    chat_tokenizer,
    model_with,
    pair_tokenizer,
    piece_tokenizer,
    samples,
)
from rlhfkit import DistillationModule, ModelPool, OnPolicyDistillationModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import (
    discounted_returns,
    on_policy_distillation_advantages,
    span_distillation_advantages,
)
from rlhfkit.modules.teachers.text import TeacherText
from rlhfkit.modules.teachers.token_texts import TokenTexts, aligned_spans

texts = st.text(st.sampled_from("1234567+ab éö🙂\n"), max_size=12)


@given(texts)
@settings(deadline=None)
def test_pieces_write_the_text_and_hold_every_token(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    sizes, written = TokenTexts(tokenizer).pieces(ids)
    assert "".join(written) == text
    assert sum(sizes) == len(ids)
    assert len(sizes) == len(written)


@given(texts, st.data())
@settings(deadline=None)
def test_spans_divide_a_text_at_all_ends_that_both_divisions_have(text: str, data: st.DataObject) -> None:
    def divided() -> list[str]:
        ends = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)))) | {0, len(text)})
        return [text[start:end] for start, end in itertools.pairwise(ends) if text[start:end]]

    first, second = divided(), divided()
    spans = aligned_spans(first, second)
    for number, side in enumerate((first, second)):
        assert [place for span in spans for place in span[number]] == list(range(len(side)))
    ends = {len("".join(first[:place])) for place in range(1, len(first) + 1)}
    both = ends & {len("".join(second[:place])) for place in range(1, len(second) + 1)}
    assert {len("".join(first[: span.first.stop])) for span in spans} == both


def test_nothing_is_compared_from_where_texts_differ() -> None:
    assert aligned_spans(["ab", "c", "d"], ["a", "b", "x", "d"]) == [(range(1), range(2))]


def test_the_teacher_reads_the_same_text_and_its_own_end_of_sequence() -> None:
    teacher, batch = byte_tokenizer(), samples([("ab 12", "34512"), ("a", "6+6")])
    found = TeacherText("text", tiny_tokenizer(), teacher).rewrite(batch)
    rows = found.experience.input_ids.tolist()
    lengths = found.experience.lengths.tolist()
    assert [teacher.decode(ids[:length]) for ids, length in zip(rows, lengths, strict=True)] == [
        "ab 1234512<end>",
        "a6+6<end>",
    ]
    # 34 5 12: three spans, of two, one and two characters; then the end of sequence
    assert found.spans[0].tolist() == [-1] * 4 + [0, 0, 1, 2, 2, 3]
    assert found.spans[1].tolist()[:4] == [0, 0, 1, 2]
    teachers = [[span for span in row if span >= 0] for row in found.teacher_spans.tolist()]
    assert teachers == [[0, 1, 2, 3], [0, 1, 2]]


def spans_of(student: Any, ids: list[int], teacher: Any, reads: str = "text") -> tuple[list[Any], list[int]]:
    """Texts of what is compared in an answer after the prompt ``a``, and the teacher's tokens of the answer."""
    prompt = student("a", add_special_tokens=False)["input_ids"]
    input_ids = torch.tensor([prompt + ids])
    mask = torch.arange(1, input_ids.shape[1])[None] >= len(prompt)
    batch = TokenBatch(input_ids=input_ids, attention_mask=torch.ones_like(input_ids, dtype=torch.bool), loss_mask=mask)
    rows = TeacherText(reads, student, teacher).read(batch)
    read, found = rows.input_ids[0].tolist(), []
    for number in range(int(rows.spans.max()) + 1):
        sides = ((student, prompt + ids, rows.spans), (teacher, read, rows.teacher_spans))
        found.append(
            [
                tokenizer.convert_ids_to_tokens([tokens[place + 1] for place in (spans[0] == number).nonzero()[:, 0]])
                for tokenizer, tokens, spans in sides
            ]
        )
    return found, read


def test_a_student_whose_decoder_leaves_out_a_space_at_the_start_is_compared() -> None:
    student, teacher = piece_tokenizer(), byte_tokenizer()
    ids = student("Hello🙂", add_special_tokens=False)["input_ids"]
    found, read = spans_of(student, ids, teacher)
    assert teacher.decode(read) == "a Hello🙂"
    assert [first for first, _ in found[:2]] == [["▁He"], ["llo"]]
    assert [len(second) for _, second in found] == [3, 3, 4]
    found, _ = spans_of(teacher, teacher("Hello")["input_ids"], student)
    assert [second for _, second in found] == [["▁He"], ["llo"]]


def test_a_space_that_only_the_teacher_begins_with_is_in_no_distribution() -> None:
    student, teacher = byte_tokenizer(), piece_tokenizer()
    batch = batch_of([("a", "Hello")], student)
    spans = {
        distributions: TeacherText("text", student, teacher, distributions=distributions).read(batch).spans[0].tolist()
        for distributions in (False, True)
    }
    assert spans == {False: [0, 0, 1, 1, 1, 2], True: [-1, -1, 0, 0, 0, 1]}  # He, llo and the end


def test_a_part_of_a_character_at_the_end_of_a_cut_answer_is_not_compared() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("1🙂")["input_ids"]
    assert spans_of(tokenizer, ids[:-1], tokenizer)[0] == [[["1"], ["1"]]]
    assert len(spans_of(tokenizer, ids, tokenizer)[0]) == 2


def test_control_tokens_inside_of_an_answer_are_in_no_span() -> None:
    student, teacher = chat_tokenizer(), byte_tokenizer()
    user = student.convert_tokens_to_ids("<user>")
    found, _ = spans_of(student, [*student("6")["input_ids"], user, *student("7")["input_ids"]], teacher)
    assert found == [[["6"], ["6"]], [["7"], ["7"]]]
    # The teacher writes 12 with one token; the student's has a control token inside.
    found, _ = spans_of(student, [*student("1")["input_ids"], user, *student("26")["input_ids"]], teacher)
    assert found == [[["6"], ["6"]]]


def test_any_control_token_ends_an_answer_as_the_teacher_ends_its_own() -> None:
    chat, plain = chat_tokenizer(), byte_tokenizer()
    turn = chat.convert_tokens_to_ids("<turn>")
    assert turn not in chat.all_special_ids  # as in Gemma and Llama 3
    assert spans_of(chat, [*chat("6")["input_ids"], turn], plain)[0][-1] == [["<turn>"], ["<end>"]]
    ended = [*plain("6")["input_ids"], plain.eos_token_id]
    assert spans_of(plain, ended, chat, "chat")[0][-1] == [["<end>"], ["<turn>"]]
    assert spans_of(plain, ended, chat, "text")[0][-1] == [["<end>"], ["<end>"]]


def test_nothing_is_written_where_there_is_no_text_between_answers() -> None:
    student, teacher = chat_tokenizer(), byte_tokenizer()
    user = student.convert_tokens_to_ids("<user>")
    ids = torch.tensor([[*student("a6")["input_ids"], user, *student("7")["input_ids"]]])
    mask = torch.tensor([[True, False, True]])
    batch = TokenBatch(input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.bool), loss_mask=mask)
    assert teacher.decode(TeacherText("text", student, teacher).read(batch).input_ids[0]) == "a67"


@pytest.mark.parametrize("end", ["<turn>", ""])
def test_conversations_are_written_in_the_teachers_template(end: str) -> None:
    student, teacher = chat_tokenizer(), byte_tokenizer()
    teacher.chat_template = (
        "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% if turn.role == 'assistant' %}<end>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    parts = [("<user>a<turn>", False), ("6" + end, True), ("<turn>"[len(end) :] + "<user>b<turn>", False), ("7", True)]
    ids = [(token, learned) for text, learned in parts for token in student(text)["input_ids"]]
    input_ids = torch.tensor([[token for token, _ in ids]])
    mask = torch.tensor([[learned for _, learned in ids][1:]])
    batch = TokenBatch(input_ids=input_ids, attention_mask=torch.ones_like(input_ids, dtype=torch.bool), loss_mask=mask)
    read = TeacherText("chat", student, teacher).read(batch)
    assert teacher.decode(read.input_ids[0]) == "[user]a[assistant]6<end>[user]b[assistant]7"
    assert int(read.spans.max()) == (2 if end else 1)


def test_the_log_prob_of_a_span_is_the_sum_of_its_tokens(tmp_path: Path) -> None:
    model_with(byte_tokenizer(), tmp_path / "teacher")
    batch = samples([("ab 12", "34512"), ("a", "6+6")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    found = TeacherText("text", tiny_tokenizer(), tokenizer).rewrite(batch)
    with torch.no_grad():
        logits = model(found.experience.input_ids).logits[:, :-1].log_softmax(-1)
    theirs = logits.gather(-1, found.experience.input_ids[:, 1:, None])[..., 0]
    told = found.to_student(theirs.where(found.experience.action_mask, 0.0))
    # By hand: the teacher's log-probs of "34", "5", "12" and the end, one after the other.
    ids = tokenizer("ab 12")["input_ids"]
    expected = []
    for piece in ("34", "5", "12", "<end>"):
        tokens = tokenizer(piece)["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + tokens])).logits[0].log_softmax(-1)
        expected.append(sum(float(logprobs[len(ids) + n - 1, token]) for n, token in enumerate(tokens)))
        ids = ids + tokens
    assert told[0].tolist() == pytest.approx([0, 0, 0, 0, 0, expected[0], expected[1], 0, *expected[2:]], abs=1e-5)


def test_spans_of_one_token_are_the_tokens(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, teacher = -torch.rand(2, 3, 7, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0], [1] * 7]).bool()
    spans = torch.arange(7).expand(3, 7)
    for gamma in (0.0, 0.5, 1.0):
        expected = discounted_returns(on_policy_distillation_advantages(logprobs, teacher, mask), mask, gamma=gamma)
        found = span_distillation_advantages(logprobs, teacher, spans, mask, gamma=gamma)
        torch.testing.assert_close(found, expected)


def test_advantages_of_spans_are_those_of_their_text() -> None:
    nan = torch.nan
    student = torch.tensor([[-1.0, -2.0, -3.0, nan, -4.0]])
    teacher = torch.tensor([[0.0, -1.5, -2.0, nan, 9.0]])
    spans, mask = torch.tensor([[0, 0, 1, 2, -1]]), torch.tensor([[True, True, True, False, True]])

    def advantages(gamma: float) -> Tensor:
        return span_distillation_advantages(student, teacher, spans, mask, gamma=gamma)[0]

    assert advantages(0.0).tolist() == [1.5, 1.5, 1.0, 0.0, 0.0]
    assert advantages(0.5).tolist() == [2.0, 2.0, 1.0, 0.0, 0.0]


def test_a_span_with_a_masked_token_inside_counts_once() -> None:
    student = torch.tensor([[-1.0, torch.nan, -2.0, -3.0]])
    teacher = torch.tensor([[0.0, torch.nan, -1.5, -1.0]])  # gaps of 1 + 0.5 and of 2
    spans, mask = torch.tensor([[0, 0, 0, 1]]), torch.tensor([[True, False, True, True]])
    for gamma, expected in ((0.0, [1.5, 0.0, 1.5, 2.0]), (0.5, [2.5, 0.0, 2.5, 2.0])):
        assert span_distillation_advantages(student, teacher, spans, mask, gamma=gamma)[0].tolist() == expected


def share_of_digits(samples: Sequence[Sample]) -> list[float]:
    """Digits among the characters of each answer."""
    return [sum(map(str.isdigit, sample.text)) / max(len(sample.text), 1) for sample in samples]


def trained(folder: Path, teacher: Any, **knobs: Any) -> list[dict[str, Any]]:
    """A run of some iterations, and the metrics of each."""
    logged: list[dict[str, Any]] = []

    class Watch(RolloutCallback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    rollouts = Watch(share_of_digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    iterations = knobs.pop("iterations", 2)
    trainer, module, data, _ = setup_run(
        folder,
        module=OnPolicyDistillationModule,
        module_arguments={"teacher": teacher, **knobs},
        rollouts=rollouts,
        max_epochs=iterations,
    )
    trainer.fit(module, data)
    return logged


@pytest.mark.parametrize("knobs", [{}, {"divergence": "jsd", "unmatched_weight": 0.5}], ids=["spans", "divergence"])
def test_a_student_learns_from_a_teacher_with_other_tokens(tmp_path: Path, knobs: dict[str, Any]) -> None:
    """The teacher writes digits one by one; the student's tokens have other numbers, and pairs of digits are tokens."""
    digit_teacher(tmp_path / "teacher")
    model_with(pair_tokenizer(), tmp_path / "model")
    run = {"teacher_reads": "text", "lr": 2e-2, "iterations": 8, "kl_coef": 0.0}
    logged = trained(tmp_path, str(tmp_path / "teacher"), **run, **knobs)
    assert all(each["distillation/aligned_fraction"] > 0.9 for each in logged)
    assert logged[-1]["rollout/reward"] > 0.95 > 0.7 > logged[0]["rollout/reward"]


def test_a_divergence_on_samples_is_that_on_data(tmp_path: Path) -> None:
    models = model_with(tiny_tokenizer(), tmp_path / "student"), model_with(byte_tokenizer(), tmp_path / "bytes", 6)
    knobs = {"teacher_reads": "text", "divergence": "jsd", "unmatched_weight": 0.3, "chunk_size": 3}
    on_policy, on_data = (kind(*map(str, models), **knobs) for kind in (OnPolicyDistillationModule, DistillationModule))
    for module in (on_policy, on_data):
        module.configure_model()
    batch = samples([("ab 12", "34512"), ("a", "6+6")])
    output = on_policy.policy_output(batch)
    data = TokenBatch(input_ids=batch.input_ids, attention_mask=batch.attention_mask, loss_mask=batch.action_mask)
    expected = on_data.loss(data).loss * batch.action_mask.sum()
    torch.testing.assert_close(output.divergence.sum(), expected)
    assert output.divergence[0].nonzero()[:, 0].tolist() == [4, 6, 7, 9]  # 34, 5, 12 and the end
    assert torch.equal(output.aligned, batch.action_mask)
    assert on_policy.loss(batch, output).metrics["distillation/aligned_fraction"] == 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"teacher_reads": "text", "divergence": "jsd", "top_k": 5}, "leave out top_k"),
        ({"teacher_reads": "text", "divergence": "jsd", "teacher": ModelPool("x"), "top_k": 5}, "leave out top_k"),
        ({"teacher_reads": "text", "unmatched_weight": 0.5}, "unmatched_weight"),
        ({"divergence": "jsd", "unmatched_weight": 0.5}, "unmatched_weight"),
        ({"teacher_reads": "text", "teacher": {"a": "x", "b": "y"}}, "give one teacher"),
        ({"teacher_reads": "aloud"}, "teacher_reads"),
    ],
)
def test_what_cannot_be_compared_as_text_is_refused(tmp_path: Path, knobs: dict[str, Any], message: str) -> None:
    tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        OnPolicyDistillationModule(str(tmp_path / "model"), **({"teacher": "teacher"} | knobs))


def test_a_sample_that_the_teacher_cannot_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 7 tokens of the teacher, whose context is 6"):
        TeacherText("text", tiny_tokenizer(), byte_tokenizer(), 6).rewrite(samples([("ab 12", "34512")]))


def test_the_prompt_is_a_turn_of_the_teachers_template_or_what_a_function_makes_of_it() -> None:
    teacher, batch = byte_tokenizer(), samples([("ab", "1")])
    teacher.chat_template = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}[1]"
    for reads, prompt in (("chat", "[user]ab[1]"), ("builtins.repr", "'ab'")):
        found = TeacherText(reads, tiny_tokenizer(), teacher).rewrite(batch)
        assert teacher.decode(found.experience.input_ids[0]) == prompt + "1<end>"
        assert found.spans.tolist() == [[-1, 0, 1]]
