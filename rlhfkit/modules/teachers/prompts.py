"""``TeacherPrompts``: the prompts of a student in the tokens of its teacher."""

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from rlhfkit.modules.teachers.token_texts import TokenTexts

READS = ("tokens", "text", "chat")
"""The student's token ids; prompt and answer as text; or the prompt in the teacher's chat template."""
_CONTENTS = {"system": "\ue001", "user": "\ue000", "assistant": "\ue002"}
"""Characters that stand for the content of a turn, to see what a template writes around it."""


class TeacherPrompts:
    """Writes a student's prompts for a teacher with tokens of its own.

    Args:
        reads: ``text``: the prompt's text; ``chat``: its turns in the teacher's chat template, or a user's turn if it
            is in no template; or the dotted name of a function from the prompt's text, control tokens included, to the
            teacher's.
        student: What the student's tokens write.
        teacher: What the teacher's write.
    """

    def __init__(self, reads: str, student: TokenTexts, teacher: TokenTexts) -> None:
        self._reads = reads
        self._student, self._teacher = student, teacher
        self._write: Callable[[str], str] | None = None
        if reads not in READS:
            self._write = pkgutil.resolve_name(reads)

    def end_of_answer(self) -> int | None:
        """The token that ends the teacher's answers.

        The control token behind an answer in its chat template, unless it reads plain text; else its end of sequence.
        """
        tokenizer = self._teacher.tokenizer
        end: int | None = tokenizer.eos_token_id
        if self._reads == "text" or tokenizer.chat_template is None:
            return end
        tokens = tokenizer(_behind_answer(tokenizer), add_special_tokens=False)["input_ids"]
        return next((token for token in tokens if token in self._teacher.controls), end)

    def tokens(self, prompt: list[int]) -> list[int]:
        """The teacher's tokens of a prompt; at least one, from which a language model predicts the next.

        Raises:
            ValueError: If the prompt's turns cannot be read.
        """
        tokenizer = self._teacher.tokenizer
        if self._reads == "text":
            tokens = list(tokenizer(self._student.text(prompt))["input_ids"])
        else:
            tokens = list(tokenizer(self._written(prompt), add_special_tokens=False)["input_ids"])
        if tokens and tokens[-1] == tokenizer.eos_token_id:  # of tokenizers that end every text
            tokens = tokens[:-1]
        return tokens or [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]

    def following(self, ids: list[int], *, ended: bool) -> list[int]:
        """The teacher's tokens of what follows an answer; there may be none.

        With ``chat`` that is a user's turn, and else the text as it is, such as the output of a tool.

        Args:
            ids: The student's tokens.
            ended: Whether the answer had its end, which is then no part of what follows.

        Raises:
            ValueError: If the turn cannot be read.
        """
        tokenizer, teacher = self._student.tokenizer, self._teacher.tokenizer
        if self._reads != "chat" or self._student.controls.isdisjoint(ids):
            return list(teacher(self._student.continuation(ids), add_special_tokens=False)["input_ids"])
        text, mark = str(tokenizer.decode(ids)), _CONTENTS["user"]
        form = _behind_answer(tokenizer, "user") if tokenizer.chat_template is not None else ""
        names = self._control_names()
        if ended:  # what is behind the first control token
            form = re.split("|".join(map(re.escape, names)), form, maxsplit=1)[-1]
        match = re.fullmatch(re.escape(form).replace(re.escape(mark), "(.*?)"), text, re.DOTALL)
        if match is None or any(name in match[1] for name in names):
            raise ValueError(
                "teacher_reads='chat' reads a user's turn in the student's chat template behind an answer, which is "
                f"followed by {text[:200]!r}: use teacher_reads='text', or data with one answer"
            )
        tokens = list(
            teacher(_behind_answer(teacher, "user").replace(mark, match[1]), add_special_tokens=False).input_ids
        )
        end = self.end_of_answer()
        return tokens[tokens.index(end) + 1 :] if ended and end in tokens else tokens

    def _written(self, prompt: list[int]) -> str:
        """A prompt for a teacher that reads it in its template, or as a function has written it."""
        if self._write is not None:
            return self._write(str(self._student.tokenizer.decode(prompt)))
        return _in_template(self._teacher.tokenizer, self._turns(prompt))

    def _turns(self, prompt: list[int]) -> list[dict[str, str]]:
        """The turns of a prompt: a user's, after a system message if there is one."""
        tokenizer = self._student.tokenizer
        controls = self._student.controls - {tokenizer.unk_token_id}
        begins = prompt[0] == tokenizer.bos_token_id  # which some templates have at each turn
        if controls.isdisjoint(prompt[1:] if begins else prompt):
            return [{"role": "user", "content": self._student.text(prompt)}]
        text, names = str(tokenizer.decode(prompt)), self._control_names()
        for roles in (("user",), ("system", "user")):
            found = self._contents(text, roles)
            if found is not None and not any(name in content for name in names for content in found):
                return [{"role": role, "content": content} for role, content in zip(roles, found, strict=True)]
        raise ValueError(
            f"teacher_reads='chat' reads a user's turn in the student's chat template, with or without a system "
            f"message, and a prompt is {text[:200]!r}: give the dotted name of a function from such a text to the "
            "teacher's"
        )

    def _control_names(self) -> list[str]:
        """What the student's control tokens look like in a text."""
        return [str(self._student.tokenizer.decode([token])) for token in sorted(self._student.controls)]

    def _contents(self, text: str, roles: tuple[str, ...]) -> tuple[str, ...] | None:
        """What a prompt in the student's template holds in turns of these roles; ``None``: it has others."""
        tokenizer: Any = self._student.tokenizer
        if tokenizer.chat_template is None:
            return None
        turns = [{"role": role, "content": _CONTENTS[role]} for role in roles]
        try:
            form = re.escape(_in_template(tokenizer, turns))
        except ValueError:  # it has no system messages
            return None
        for role in roles:
            form = form.replace(re.escape(_CONTENTS[role]), "(.*?)")
        match = re.fullmatch(form, text, re.DOTALL)
        return None if match is None or len(match.groups()) != len(roles) else match.groups()


def _in_template(tokenizer: Any, turns: list[dict[str, str]], *, answer_follows: bool = True) -> str:
    """Turns in a tokenizer's chat template; ValueError if it refuses them or there is none."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer_follows))
    except TemplateError as error:
        roles = [turn["role"] for turn in turns]
        raise ValueError(f"a chat template refuses turns of {roles}, as the prompts have them: {error}") from error


def _behind_answer(tokenizer: Any, *roles: str) -> str:
    """What a chat template writes behind an answer: its end, and then turns of ``roles`` and the start of the next."""
    turns = [{"role": role, "content": _CONTENTS[role]} for role in ("assistant", *roles)]
    written = _in_template(tokenizer, [{"role": "user", "content": "a"}, *turns], answer_follows=bool(roles))
    return written.rpartition(_CONTENTS["assistant"])[2]
