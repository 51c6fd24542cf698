"""Evaluate a program from outside the sandbox: send inputs and arguments, and have what it returns judged.

Expected values never enter the program's sandbox, and its answers are parsed in neither the trainer nor there, but in
a process of ``judge.py``.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.rewards.programs.assertions import CallTest, ParsedAssertions
from rlhfkit.rewards.programs.parsing import ProgramTests
from rlhfkit.rewards.programs.values import dumps
from rlhfkit.rewards.sandbox.process import CallResult

STARTUP_SECONDS = 10.0
"""Added to the time limit of a program's run, for starting the interpreter."""

CallWorker = Callable[[Any, float], CallResult]
"""Sends a job to a process, with a time limit in seconds."""


class SandboxError(Exception):
    """The sandbox gave no answer, so nothing is known about the program; ``outcome`` says why."""

    def __init__(self, outcome: CallResult) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class _NoAnswerError(Exception):
    """The program, or the judge, gave no answer in time, so the test fails."""


@dataclass(slots=True)
class ProgramEvaluation:
    """Evaluates one program on its tests, with calls of its sandbox's worker and of a judge.

    ``program`` are sources that run one after another in one interpreter. ``timeout`` is the limit of one run in
    seconds: one input, or all calls or assertions together, and judging them. Starting processes does not count.
    """

    call_worker: CallWorker
    call_judge: CallWorker
    program: list[str]
    timeout: float
    timed_out: bool = False
    """Whether a run took too long; the tests after it count as failed."""
    opaque: set[str] = field(default_factory=set)
    """Type names of answers that could not be carried out of the sandbox, in tests that failed."""
    seconds: float = 0.0
    _left: float = 0.0

    def count_passed(self, tests: ProgramTests, compare: Callable[[str, str], bool]) -> int:
        """Run the tests and count those that pass; raises :class:`SandboxError` if a process gives no answer.

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
            self._left = self.timeout
            output = self._text({"do": "run", "program": self.program, "input": text})
            count += output is not None and compare(output, expected)
            if self.timed_out:  # a program that hangs on one input usually hangs on others
                break
        return count

    def _count_calls(self, tests: list[ParsedAssertions | CallTest]) -> int:
        """Count the tests that pass by the judge, with one interpreter for all calls."""
        if not self._open("calls"):
            return 0
        count = 0
        for test in tests:
            try:
                count += self._passes(test)
            except _NoAnswerError:
                if self.timed_out:
                    break
        return count

    def _passes(self, test: ParsedAssertions | CallTest) -> bool:
        if isinstance(test, CallTest):
            call = {"function": test.function, "method": None, "arguments": dumps(list(test.arguments))}
            return self._holds({"expected": dumps(test.expected)}, self._called({**call, "keywords": dumps({})}))
        conditions = range(len(test.conditions))
        return all(self._holds({"test": test.source, "condition": condition}) for condition in conditions)

    def _holds(self, condition: dict[str, Any], *answers: str) -> bool:
        """Whether a condition holds: the judge names the calls that it needs, one by one, and then decides."""
        while self._left > 0:
            outcome = self.call_judge({**condition, "answers": list(answers)}, self._left)
            self._left -= outcome.seconds
            match outcome.value:
                case {"call": dict() as call} if outcome.status == "ok":
                    answers = (*answers, self._called(call))
                case {"passed": bool() as passed, "opaque": list() as opaque} if outcome.status == "ok":
                    self.opaque |= set() if passed else set(opaque)
                    return passed
                case _ if outcome.status != "timeout":
                    raise SandboxError(outcome)
        self.timed_out = True
        raise _NoAnswerError

    def _called(self, call: dict[str, Any]) -> str:
        text = self._text({"do": "ask", "line": call})
        if text is None:
            raise _NoAnswerError
        return text

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
        self._left = self.timeout
        return self._text({"do": "open", "mode": mode, "program": self.program}) is not None

    def _text(self, job: dict[str, Any]) -> str | None:
        """Return the program's answer to a job."""
        left = max(self._left, 0.0)
        outcome = self.call_worker({**job, "seconds": left}, left + STARTUP_SECONDS)
        self._left -= outcome.seconds
        match outcome.value:
            case {"text": str() | None as text, "timeout": bool() as timed_out} if outcome.status == "ok":
                self.timed_out = self.timed_out or timed_out
                return text
        if outcome.status == "ok":  # not an answer of worker.py
            message = f"its sandbox answered {str(outcome.value)[:200]}"
            outcome = CallResult("error", message=message, seconds=outcome.seconds)
        raise SandboxError(outcome)
