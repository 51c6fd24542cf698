"""What runs inside the processes that judge mathematics for :mod:`rlhfkit.rewards.math`; imports math-verify only.

Symbolic algebra can take for ever on what a policy writes (``9^{9^{9^9}}``), some of it inside C code that no signal
interrupts. So each judgement has three limits: math-verify's own alarm, which works because this is a main thread,
behind it a watchdog that ends the process from a C thread, and behind that the sandbox.
"""

import faulthandler
import sys
from collections.abc import Callable


def gold_text(answer: str) -> str:
    r"""The reference answer as math-verify reads it: boxed, unless it is marked up already.

    Args:
        answer: E.g. ``"42"`` or ``r"\frac{1}{2}"``.
    """
    return answer if "$" in answer or "\\boxed" in answer or "\\[" in answer else f"\\boxed{{{answer}}}"


def judge(answer: str, text: str, timeout: int) -> float | None:
    """1 if the text ends in the answer, 0 if not, ``None`` if the answer cannot be understood.

    Args:
        answer: The reference.
        text: What the policy wrote.
        timeout: Seconds for each of the three stages.
    """
    from math_verify import parse, verify

    gold = parse(gold_text(answer), parsing_timeout=timeout)
    if not gold:
        return None
    return float(verify(gold, parse(text, parsing_timeout=timeout), timeout_seconds=timeout))


def judge_within(timeout: int) -> Callable[[dict[str, str]], float | None]:
    """The judge, with everything loaded.

    Args:
        timeout: Seconds for each of the three stages.
    """
    judge("1", "$1$", timeout)  # imports and warms up

    def judged(job: dict[str, str]) -> float | None:
        faulthandler.dump_traceback_later(3 * timeout + 1, exit=True, file=sys.stderr)
        try:
            return judge(job["answer"], job["text"], timeout)
        except Exception:  # math-verify catches its own; whatever is left is no match
            return 0.0
        finally:
            faulthandler.cancel_dump_traceback_later()

    return judged
