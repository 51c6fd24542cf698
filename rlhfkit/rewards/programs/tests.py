"""Programs and their tests as they are written: code blocks in completions, tests in the columns of data sets."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORMS = (
    "a list of assert statements, or a list of {'input': ..., 'output': ...}, or {'inputs': [...], 'outputs': [...]}, "
    "or JSON text of one of these, or the code of one test"
)
_PYTHON = ("", "python", "python3", "py")


def last_code_block(text: str) -> str | None:
    """The last closed block between fences of three backticks, of Python or of no named language.

    Args:
        text: A completion.
    """
    blocks = re.findall(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", text, re.DOTALL | re.MULTILINE)
    programs: list[str] = [block for language, block in blocks if language.strip().lower() in _PYTHON]
    return programs[-1] if programs else None


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
    """What a program must do: hold to assertions, or give outputs for inputs."""

    assertions: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many."""
        return len(self.assertions) + len(self.inputs)


def read_tests(given: Any) -> ProgramTests:
    """Tests as data sets write them: MBPP and HumanEval (code), APPS, TACO and CodeContests (inputs and outputs).

    Args:
        given: A list of assert statements, a list of ``{"input": ..., "output": ...}``, ``{"inputs": [...], "outputs":
            [...]}``, JSON text of one of these, or the code of one test.

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
        inputs, outputs = [test.get("input") for test in given], [test.get("output") for test in given]
        if _texts(inputs) and _texts(outputs):
            return ProgramTests(inputs=tuple(inputs), outputs=tuple(outputs))
    raise ValueError(f"tests must be {_FORMS}; got {str(given)[:200]!r}")


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(text, str) for text in value)
