"""The process that judges mathematics for :mod:`rlhfkit.rewards.maths`. Run as a program; imports math-verify only.

It reads one JSON object per line, ``{"answer": ..., "text": ...}``, and writes one, ``{"score": 1.0}``, ``0.0``, or
``null`` when the reference answer itself cannot be understood. It ends when its input ends.

Symbolic algebra can take for ever on what a policy writes (``9^{9^{9^9}}``), some of it inside C code that no signal
interrupts. So each judgement has two limits: math-verify's own alarm, which works because this is a main thread, and
behind it a watchdog that ends the process from a C thread.
"""

import faulthandler
import json
import os
import sys

MEMORY_LIMIT = 4 << 30
"""Bytes of address space; big powers ask for more."""


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


def main() -> None:
    """Judge until the input ends."""
    timeout = int(sys.argv[1])
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    answers = os.fdopen(os.dup(1), "w")  # libraries may print; only answers go to the real output
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    judge("1", "$1$", 0)  # imports and warms up
    print("ready", file=answers, flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # up to here the parent reads our errors, from here on nobody does
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(3 * timeout + 1, exit=True)
        try:
            score = judge(request["answer"], request["text"], timeout)
        except (Exception, MemoryError):  # math-verify catches its own; whatever is left is no match
            score = 0.0
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"score": score}), file=answers, flush=True)


if __name__ == "__main__":
    main()
