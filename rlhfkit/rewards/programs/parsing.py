"""Parse programs and tests: code blocks in completions, tests in the columns of data sets."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhfkit.rewards.programs.assertions import CallTest, ParsedAssertions, parse_assertions

_FORMS = (
    "a list of assert statements, or a list of {'input': ..., 'output': ...}, or {'inputs': [...], 'outputs': [...]}, "
    "or a list of {'function': ..., 'arguments': [...], 'expected': ...}, or JSON text of one of these, or the code of "
    "one test"
)
_PYTHON = ("", "python", "python3", "py")


def last_code_block(text: str) -> str | None:
    """Return the last closed block in fences of three backticks whose language is Python or missing."""
    programs = [block for language, block in _blocks(text) if language.strip().lower() in _PYTHON]
    return programs[-1] if programs else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of closed blocks in one pass over the lines, since a policy may write many fences."""
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
    """Whether two texts are equal up to white space at the ends of lines and of the text."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.strip().splitlines()]

    return lines(output) == lines(expected)


@dataclass(frozen=True)
class ProgramTests:
    """The tests of a program: assertions, inputs with expected outputs, or calls with expected values."""

    assertions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    calls: tuple[CallTest, ...] = ()

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(self.assertions) + len(self.inputs) + len(self.calls)

    @property
    def parsed(self) -> tuple[ParsedAssertions | None, ...]:
        """Each assertion parsed for evaluation outside of the program; ``None`` if it has to run inside."""
        return tuple(map(parse_assertions, self.assertions))

    def first(self, count: int | None) -> "ProgramTests":
        """Return the first ``count`` tests of each kind; ``None``: all."""
        return ProgramTests(self.assertions[:count], self.inputs[:count], self.outputs[:count], self.calls[:count])


def parse_tests(given: Any) -> ProgramTests:
    """Parse tests as data sets write them: MBPP and HumanEval (code), APPS, TACO and CodeContests (inputs and outputs).

    ``given`` is a list of assert statements, a list of ``{"input": ..., "output": ...}``, ``{"inputs": [...],
    "outputs": [...]}``, a list of ``{"function": ..., "arguments": [...], "expected": ...}``, JSON text of one of
    these, or the code of one test. Raises ``ValueError`` if it is empty or anything else.
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
