"""The grader that runs in the child processes of :mod:`rlhfkit.rewards.math`; imports math-verify only.

Symbolic algebra can take forever (``9^{9^{9^9}}``), partly in C code that no signal interrupts. So each call has three
limits: math-verify's alarm, which works in this main thread; a watchdog thread in C that ends the process; the sandbox.
"""

import faulthandler
import sys
from collections.abc import Callable


def gold_text(answer: str) -> str:
    r"""Return the reference answer for math-verify: in ``\boxed{}``, unless it has LaTeX delimiters already."""
    return answer if "$" in answer or "\\boxed" in answer or "\\[" in answer else f"\\boxed{{{answer}}}"


def grade(answer: str, text: str, timeout: int) -> float | None:
    """1 if the answers are equal, else 0; ``None`` if ``answer`` cannot be parsed. ``timeout``: seconds per step."""
    from math_verify import parse, verify

    gold = parse(gold_text(answer), parsing_timeout=timeout)
    if not gold:
        return None
    return float(verify(gold, parse(text, parsing_timeout=timeout), timeout_seconds=timeout))


def make_grader(_layers: list[str], timeout: int) -> Callable[[dict[str, str]], float | None]:
    """Return the function that grades one job, in any isolation; ``timeout`` as in :func:`grade`."""
    grade("1", "$1$", timeout)  # imports and warms up

    def graded(job: dict[str, str]) -> float | None:
        faulthandler.dump_traceback_later(3 * timeout + 1, exit=True, file=sys.stderr)
        try:
            return grade(job["answer"], job["text"], timeout)
        except Exception:  # math-verify catches its own errors; any other is no match
            return 0.0
        finally:
            faulthandler.cancel_dump_traceback_later()

    return graded
