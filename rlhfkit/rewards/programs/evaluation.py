"""Evaluate a program from outside the sandbox: send inputs and arguments, and compare what it returns.

Expected values stay on this side, which reads the program's answers as plain data.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhfkit.rewards.programs.assertions import CallTest, ParsedAssertions, TestFailed
from rlhfkit.rewards.programs.parsing import ProgramTests
from rlhfkit.rewards.programs.values import dumps, loads
from rlhfkit.rewards.sandbox.process import CallResult

STARTUP_SECONDS = 10.0
"""Added to the time limit of a program's run, for starting the interpreter."""

CallWorker = Callable[[Any, float], CallResult]
"""Sends a job to the sandbox's worker, with a time limit in seconds."""


class SandboxError(Exception):
    """The sandbox gave no answer, so nothing is known about the program; ``outcome`` says why."""

    def __init__(self, outcome: CallResult) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(slots=True)
class ProgramEvaluation:
    """Evaluates one program (``program``: its source) on its tests, with calls of its sandbox's worker.

    ``timeout`` is the limit of one run in seconds: one input, or all calls or assertions together.
    """

    call_worker: CallWorker
    program: str
    timeout: float
    timed_out: bool = False
    """Whether a run took too long; the tests after it count as failed."""
    seconds: float = 0.0
    _deadline: float = 0.0

    def count_passed(self, tests: ProgramTests, compare: Callable[[str, str], bool]) -> int:
        """Run the tests and count those that pass; raises :class:`SandboxError` if the sandbox gives no answer.

        ``compare`` says whether an output equals the expected one.
        """
        started = time.monotonic()
        try:
            parsed = [test for test in tests.parsed if test is not None]
            in_process = [code for code, test in zip(tests.assertions, tests.parsed, strict=False) if test is None]
            count = self._count_outputs(tests, compare) if tests.inputs else 0
            count += self._count_calls([*parsed, *tests.calls]) if parsed or tests.calls else 0
            return count + (self._count_in_process(in_process) if in_process else 0)
        finally:
            self.seconds = time.monotonic() - started

    def _count_outputs(self, tests: ProgramTests, compare: Callable[[str, str], bool]) -> int:
        """Count the inputs that pass, each in a separate run."""
        count = 0
        for text, expected in zip(tests.inputs, tests.outputs, strict=True):
            self._deadline = time.monotonic() + self.timeout
            output = self._text({"do": "run", "program": self.program, "input": text})
            count += output is not None and compare(output, expected)
            if self.timed_out:  # a program that hangs on one input usually hangs on others
                break
        return count

    def _count_calls(self, tests: list[ParsedAssertions | CallTest]) -> int:
        """Count the tests that pass, evaluated here, with one interpreter for all calls."""
        if not self._open("calls"):
            return 0
        count = 0
        for test in tests:
            try:
                count += test.passes(self._call)
            except TestFailed:
                if self.timed_out:
                    break
        return count

    def _count_in_process(self, tests: list[str]) -> int:
        """Count the assertions that pass in the program's interpreter, which reports success by a random token."""
        if not self._open("assertions"):
            return 0
        count = 0
        for code in tests:
            token = secrets.token_hex(16)
            answer = self._text({"do": "ask", "line": {"code": code, "token": token}})
            count += answer == token
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
        except ValueError as error:  # the name of what it raised, or no valid value
            raise TestFailed(str(error)) from None

    def _text(self, job: dict[str, Any]) -> str | None:
        """Return the program's answer to a job."""
        left = max(self._deadline - time.monotonic(), 0.0)
        outcome = self.call_worker({**job, "seconds": left}, left + STARTUP_SECONDS)
        match outcome.value:
            case {"text": str() | None as text, "timeout": bool() as timed_out} if outcome.status == "ok":
                self.timed_out = self.timed_out or timed_out
                return text
        if outcome.status == "ok":  # not an answer of worker.py
            message = f"its sandbox answered {str(outcome.value)[:200]}"
            outcome = CallResult("error", message=message, seconds=outcome.seconds)
        raise SandboxError(outcome)
