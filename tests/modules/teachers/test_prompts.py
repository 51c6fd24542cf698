"""Prompts of a student for a teacher with other tokens: which turns of a chat template can be read."""

import pytest

from modules.teachers.teacher_cases import byte_tokenizer, chat_tokenizer
from rlhfkit.modules.teachers.prompts import TeacherPrompts
from rlhfkit.modules.teachers.token_texts import TokenTexts


def prompts(reads: str) -> TeacherPrompts:
    """Of a student with a template, for a teacher with another."""
    teacher = byte_tokenizer()
    teacher.chat_template = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}[1]"
    return TeacherPrompts(reads, TokenTexts(chat_tokenizer()), TokenTexts(teacher))


@pytest.mark.parametrize(
    ("turns", "written"),
    [
        ([("user", "ab")], "[user]ab[1]"),
        ([("system", "4"), ("user", "a\nb")], "[system]4[user]a\nb[1]"),
        ([], "[user]plain[1]"),
    ],
)
def test_turns_in_the_students_template_are_written_in_the_teachers(turns: list[tuple[str, str]], written: str) -> None:
    student = chat_tokenizer()
    messages = [{"role": role, "content": content} for role, content in turns]
    text = student.apply_chat_template(messages, tokenize=False) if turns else "plain"
    found = prompts("chat").tokens(student(text)["input_ids"])
    assert byte_tokenizer().decode(found) == written


def test_turns_that_cannot_be_read_are_an_error_and_a_function_can_read_them() -> None:
    student = chat_tokenizer()
    ids = student("<user>a<turn>b<turn><user>c<turn>")["input_ids"]
    with pytest.raises(ValueError, match=r"a prompt is '<user>a<turn>b<turn><user>c<turn>': give the dotted name"):
        prompts("chat").tokens(ids)
    assert byte_tokenizer().decode(prompts("builtins.repr").tokens(ids)) == "'<user>a<turn>b<turn><user>c<turn>'"


def test_what_follows_an_answer_is_text_or_a_users_turn() -> None:
    student = chat_tokenizer()
    for reads, text in (("chat", "4 5"), ("text", "4 5"), ("text", "<user>4 5<turn>")):
        found = prompts(reads).following(student(text)["input_ids"], ended=True)
        assert byte_tokenizer().decode(found) == "4 5"
    found = prompts("chat").following(student("<user>4<turn>")["input_ids"], ended=True)
    assert byte_tokenizer().decode(found) == "[user]4[1]"
    with pytest.raises(ValueError, match=r"is followed by '<user>b<turn><user>c<turn>': use teacher_reads='text'"):
        prompts("chat").following(student("<user>b<turn><user>c<turn>")["input_ids"], ended=True)


def test_a_template_that_begins_every_turn_with_the_first_token_of_a_text_is_one() -> None:
    student, teacher = chat_tokenizer(), byte_tokenizer()
    student.bos_token, student.eos_token = "<user>", "<turn>"  # as in SmolLM2
    teacher.chat_template = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"
    read = TeacherPrompts("chat", TokenTexts(student), TokenTexts(teacher))
    assert teacher.decode(read.tokens(student("<user>ab<turn>")["input_ids"])) == "[user]ab"
    assert teacher.decode(read.tokens(student("<user>ab")["input_ids"])) == "[user]ab"


def test_a_template_that_refuses_turns_is_an_error() -> None:
    student, teacher = chat_tokenizer(), byte_tokenizer()
    teacher.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    read = TeacherPrompts("chat", TokenTexts(student), TokenTexts(teacher))
    with pytest.raises(ValueError, match=r"refuses turns of \['system', 'user'\], as the prompts have them: no system"):
        read.tokens(student("<user>!a<turn><user>b<turn>")["input_ids"])


def test_the_prompt_has_at_least_one_token() -> None:
    assert prompts("text").tokens([chat_tokenizer().convert_tokens_to_ids("<turn>")]) == [byte_tokenizer().eos_token_id]
