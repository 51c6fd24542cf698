"""Programs and their tests as they are written: code blocks in completions, tests in the columns of data sets."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfkit.rewards.programs.assertions import Assertions, CallTest, judged_outside

_FORMS = (
    "a list of assert statements, or a list of {'input': ..., 'output': ...}, or {'inputs': [...], 'outputs': [...]}, "
    "or a list of {'function': ..., 'arguments': [...], 'expected': ...}, or JSON text of one of these, or the code of "
    "one test"
)
_PYTHON = ("", "python", "python3", "py")


def last_code_block(text: str) -> str | None:
    """The last closed block between fences of three backticks, of Python or of no named language.

    Args:
        text: A completion.
    """
    programs = [block for language, block in _blocks(text) if language.strip().lower() in _PYTHON]
    return programs[-1] if programs else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of closed blocks; one look at each line, as a policy writes many fences."""
    language: str | None = None
    content: list[str] = []
    for line in text.split("\n"):
        if language is None:
            if line.startswith("```") and "`" not in line[3:]:
                language, content = line[3:], []
        elif line.startswith("```") and not line[3:].strip(" \t"):
            yield language, "".join(content)
            language = None
        else:
            content.append(line + "\n")


def same_output(output: str, expected: str) -> bool:
    """Whether two texts agree but for white space at the ends of lines and of the text.

    Args:
        output: What a program wrote.
        expected: What it should have written.
    """

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(output) == lines(expected)


@dataclass(frozen=True)
class ProgramTests:
    """What a program must do: hold to assertions, give outputs for inputs, or give values for arguments."""

    assertions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: tuple[CallTest, ...] = ()

    @property
    def count(self) -> int:
        """How many."""
        return len(self.assertions) + len(self.inputs) + len(self.calls)

    @property
    def judged(self) -> tuple[Assertions | None, ...]:
        """Each assertion as one that is judged outside of the program, ``None`` where it has to run with it."""
        return tuple(map(judged_outside, self.assertions))

    def first(self, count: int | None) -> "ProgramTests":
        """Only so many.

        Args:
            count: Of each kind; ``None``: all.
        """
        return ProgramTests(self.assertions[:count], self.inputs[:count], self.outputs[:count], self.calls[:count])


def read_tests(given: Any) -> ProgramTests:
    """Tests as data sets write them: MBPP and HumanEval (code), APPS, TACO and CodeContests (inputs and outputs).

    Args:
        given: A list of assert statements, a list of ``{"input": ..., "output": ...}``, ``{"inputs": [...], "outputs":
            [...]}``, a list of ``{"function": ..., "arguments": [...], "expected": ...}``, JSON text of one of these,
            or the code of one test.

    Raises:
        ValueError: If it is something else, or empty.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"tests look like JSON but are not ({error}); they may be {_FORMS}") from error
    if isinstance(given, str) and given.strip():
        return ProgramTests(assertions=(given,))
    if isinstance(given, Mapping) and not given.get("fn_name"):
        inputs, outputs = given.get("inputs", given.get("input")), given.get("outputs", given.get("output"))
        if _texts(inputs) and _texts(outputs) and len(inputs) == len(outputs):
            return ProgramTests(inputs=tuple(inputs), outputs=tuple(outputs))
    if _texts(given):
        return ProgramTests(assertions=tuple(given))
    if isinstance(given, list | tuple) and given and all(isinstance(test, Mapping) for test in given):
        if all(isinstance(test.get("function"), str) and "expected" in test for test in given):
            arguments = [test.get("arguments") for test in given]
            if all(isinstance(one, list | tuple) for one in arguments):
                pairs = zip(given, arguments, strict=True)
                return ProgramTests(calls=tuple(CallTest(t["function"], tuple(a), t["expected"]) for t, a in pairs))
        inputs, outputs = [test.get("input") for test in given], [test.get("output") for test in given]
        if _texts(inputs) and _texts(outputs):
            return ProgramTests(inputs=tuple(inputs), outputs=tuple(outputs))
    raise ValueError(f"tests must be {_FORMS}; got {str(given)[:200]!r}")


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(text, str) for text in value)
