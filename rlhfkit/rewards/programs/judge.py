"""The function that judges programs' answers in a process of its own, where it can be stopped.

Answers come from hostile programs, and comparing them can take forever: sets of numbers that have one hash,
``round(1, -(10**10))``. This process holds expected values, runs no program, and is killed when the program's time is
over. Loaded by path; standard library only.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def judge(_layers: list[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that judges one condition of a test, in any isolation."""
    assertions, values = _load("assertions"), _load("values")

    def judged(job: dict[str, Any]) -> dict[str, Any]:
        """Judge ``condition`` of ``test``, or whether the only answer is ``expected``, by the ``answers`` so far.

        Returns ``call``, the next call of the program that is needed; or whether the condition is ``passed``, and
        ``opaque``, the type names of what could not be carried over.
        """
        opaque: list[str] = []
        try:
            answers = [values.loads(answer, opaque) for answer in job["answers"]]
            if "expected" in job:
                return {"passed": bool(answers[0] == values.loads(job["expected"], opaque)), "opaque": opaque}
            left = iter(answers)

            def call(function: str, method: str | None, arguments: list[Any], keywords: dict[str, Any]) -> Any:
                try:
                    return next(left)
                except StopIteration:
                    given = {"arguments": values.dumps(arguments), "keywords": values.dumps(keywords)}
                    raise _CallNeededError({"function": function, "method": method, **given}) from None

            passed = assertions.parse_assertions(job["test"]).holds(job["condition"], call)
            return {"passed": passed, "opaque": opaque}
        except _CallNeededError as needed:
            return {"call": needed.call}
        except (assertions.TestFailed, ValueError, RecursionError, MemoryError):  # of wrong answers, or too large ones
            return {"passed": False, "opaque": opaque}

    return judged


class _CallNeededError(BaseException):
    """The program has to be called; no error of the test, so it passes by what handles those."""

    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.call = call


def _load(name: str) -> ModuleType:
    """Import a file of this folder by its path: under Landlock the folder itself cannot be listed."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"rlhfkit_programs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
