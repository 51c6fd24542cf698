"""Examining a program from outside: what it is asked, and whether what it answers is right.

The program runs in a sandbox and gets inputs and arguments only. This side knows what is expected, and reads the
program's answers as plain data.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfkit.rewards.programs.assertions import Assertions, CallTest, TestFailed
from rlhfkit.rewards.programs.parsing import ProgramTests
from rlhfkit.rewards.programs.values import dumps, loads
from rlhfkit.rewards.sandbox.process import Outcome

SLACK = 10.0
"""Seconds beyond the time limit of a program's run, for starting it."""

Ask = Callable[[Any, float], Outcome]
"""Sends a job to the sandbox's worker, with a time limit in seconds."""


class SandboxFailed(Exception):
    """The sandbox gave no answer, so nothing is known about the program.

    Args:
        outcome: What it gave instead.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(slots=True)
class Examination:
    """One program before its tests.

    Args:
        ask: Reaches its sandbox.
        program: Its code.
        timeout: Seconds of one run: of an input, or of all calls or assertions together.
        alone: Whether the sandbox has process ids of its own.
    """

    ask: Ask
    program: str
    timeout: float
    alone: bool
    late: bool = False
    """Whether a run took too long; the tests behind it count as failed."""
    seconds: float = 0.0
    _deadline: float = 0.0

    def passed(self, tests: ProgramTests, compare: Callable[[str, str], bool]) -> int:
        """How many tests the program passes.

        Args:
            tests: All of them.
            compare: Whether an output and the expected one agree.

        Raises:
            SandboxFailed: If the sandbox gives no answer.
        """
        started = time.monotonic()
        try:
            judged = [test for test in tests.judged if test is not None]
            free = [code for code, test in zip(tests.assertions, tests.judged, strict=False) if test is None]
            count = self._outputs(tests, compare) if tests.inputs else 0
            count += self._judged([*judged, *tests.calls]) if judged or tests.calls else 0
            return count + (self._free(free) if free else 0)
        finally:
            self.seconds = time.monotonic() - started

    def _outputs(self, tests: ProgramTests, compare: Callable[[str, str], bool]) -> int:
        """Of inputs, each a run of its own."""
        count = 0
        for text, expected in zip(tests.inputs, tests.outputs, strict=True):
            self._deadline = time.monotonic() + self.timeout
            output = self._text({"do": "run", "program": self.program, "input": text})
            count += output is not None and compare(output, expected)
            if self.late:  # what hangs once would mostly hang again
                break
        return count

    def _judged(self, tests: list[Assertions | CallTest]) -> int:
        """Of tests that are judged here, one after the other on one interpreter."""
        if not self._open("calls"):
            return 0
        count = 0
        for test in tests:
            try:
                count += test.holds(self._call)
            except TestFailed:
                if self.late:
                    break
        return count

    def _free(self, tests: list[str]) -> int:
        """Of assertions that run with the program, each with a word of its own that says that it has passed."""
        if not self._open("assertions"):
            return 0
        count = 0
        for code in tests:
            word = secrets.token_hex(16)
            answer = self._text({"do": "ask", "line": {"code": code, "word": word}})
            count += answer == word
            if answer is None:
                break
        return count

    def _open(self, mode: str) -> bool:
        self._deadline = time.monotonic() + self.timeout
        return self._text({"do": "open", "mode": mode, "program": self.program}) is not None

    def _call(self, function: str, method: str | None, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        given = {"arguments": dumps(arguments), "keywords": dumps(keywords)}
        text = self._text({"do": "ask", "line": {"function": function, "method": method, **given}})
        if text is None:
            raise TestFailed("the program did not answer")
        try:
            return loads(text)
        except ValueError as error:  # what it raised, or nonsense
            raise TestFailed(str(error)) from None

    def _text(self, job: dict[str, Any]) -> str | None:
        """The program's answer to a job."""
        left = max(self._deadline - time.monotonic(), 0.0)
        outcome = self.ask({**job, "seconds": left, "alone": self.alone}, left + SLACK)
        match outcome.value:
            case {"text": str() | None as text, "timeout": bool() as late} if outcome.status == "ok":
                self.late = self.late or late
                return text
        if outcome.status == "ok":  # not what our side of the sandbox writes
            message = f"its sandbox answered {str(outcome.value)[:200]}"
            outcome = Outcome("error", message=message, seconds=outcome.seconds)
        raise SandboxFailed(outcome)
