"""``math_match``: is the completion's final answer mathematically equal to the reference?

math-verify (Kydlíček and Gandenberger, https://github.com/huggingface/Math-Verify) finds the answer in the text and
compares it with SymPy. Its time limits are signal alarms, which work in a main thread only, and some of SymPy cannot be
interrupted at all; rewards run in any thread. So judging happens in processes of its own
(:mod:`rlhfkit.rewards.sandbox`), and one that does not answer is killed and replaced.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.call_metrics import CallMetrics
from rlhfkit.rewards.rules import required_answer
from rlhfkit.rewards.sandbox import Outcome, Sandbox, Work
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


class MathMatch:
    """1 where the completion's final answer equals the reference answer mathematically, else 0.

    A completion that cannot be judged in time counts as wrong; a sample whose *reference* cannot be understood is not
    scored (``None``), with a warning. LaTeX answers are found in a box or between dollar signs, plain numbers anywhere.
    """

    bounded: ClassVar[bool] = True
    """Every judgement ends in time."""

    def __init__(self, *, timeout: int = 5, workers: int | None = None) -> None:
        """Set the limits; nothing is started before the first call.

        Args:
            timeout: Seconds each for reading the reference, reading the completion and comparing (math-verify's
                default).
            workers: Processes; ``None``: one per core, at most 4.

        Raises:
            ValueError: If one of them is below 1.
            ImportError: If math-verify is not installed.
        """
        check_integer("timeout", timeout, minimum=1, why="it is in seconds")
        check_integer("workers", workers, minimum=1, optional=True)
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math_match needs math-verify: pip install 'rlhfkit[math]'")
        work = Work(
            name="math-verify",
            program=Path(__file__).with_name("math_worker.py"),
            factory="judge_within",
            arguments=(timeout,),
        )
        self.sandbox = Sandbox(
            work,
            workers=min(4, os.cpu_count() or 1) if workers is None else workers,
            timeout=3 * timeout + 5,  # math-verify's own limits come first
        )
        self._metrics = CallMetrics("math_match")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            ValueError: If a prompt has no answer.
            RuntimeError: If no process can be started that judges.
        """
        answers = [str(required_answer(sample, "math_match")) for sample in samples]
        jobs = [{"answer": answer, "text": sample.text} for answer, sample in zip(answers, samples, strict=True)]
        scores: list[float | None] = []
        for sample, outcome in zip(samples, self.sandbox.map(jobs), strict=True):
            if outcome.status == "ok" and outcome.value not in (None, 0.0, 1.0):  # SymPy may evaluate what it reads
                outcome = Outcome("error", message=f"answered {str(outcome.value)[:200]}", seconds=outcome.seconds)
            self._metrics.add(outcome)
            scores.append(outcome.value if outcome.status == "ok" else 0.0)
            if outcome.status != "ok":
                log.warning(
                    "math_match: a sample of prompt %d counts as wrong, as judging it failed: %s",
                    *(sample.prompt.index, outcome.message),
                )
        unclear = {answer for answer, score in zip(answers, scores, strict=True) if score is None}
        if unclear:
            log.warning(
                "math_match cannot understand these reference answers, their samples are not scored: %s", unclear
            )
        return scores

    def metrics(self) -> dict[str, float]:
        """Since it was last asked: how judging went, see :class:`~rlhfkit.rewards.call_metrics.CallMetrics`."""
        return self._metrics.take()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        self.sandbox.close()


@cache
def _shared() -> MathMatch:
    return MathMatch()


def math_match(samples: Sequence[Sample]) -> list[float | None]:
    """1 where the completion's final answer equals the reference answer mathematically, else 0.

    :class:`MathMatch` is the same with arguments.

    Args:
        samples: With ``prompt.answer`` set.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If a prompt has no answer.
    """
    return _shared()(samples)
