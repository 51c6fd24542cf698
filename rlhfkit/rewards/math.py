"""``math_match``: compare the completion's final answer with the reference, mathematically.

math-verify (Kydlíček and Gandenberger, https://github.com/huggingface/Math-Verify) finds the answer in the text and
compares it with SymPy. Its time limits are signal alarms, which work in a main thread only, and parts of SymPy cannot
be interrupted at all, so it runs in child processes (:mod:`rlhfkit.rewards.sandbox`) that can be killed.
"""

import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import AnswerReader, Needs, check_packages, extracts_answer, needs
from rlhfkit.rewards.benchmarks import voted_answer
from rlhfkit.rewards.rules import required_answer
from rlhfkit.rewards.sandbox import CallResult, SandboxPool, WorkerSpec
from rlhfkit.rewards.subprocesses import CallMetrics
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_NEEDS = Needs(packages={"math_verify": "rlhfkit[math]"}, answer=True)


class MathMatch:
    r"""1 where the completion's final answer equals the reference answer mathematically, else 0.

    A completion that cannot be graded in time counts as wrong. A sample whose *reference* cannot be parsed gets
    ``None``, with a warning. LaTeX answers are found in ``\boxed`` or between dollar signs, plain numbers anywhere.
    """

    has_timeout: ClassVar[bool] = True
    """Every call returns in time."""

    needs: ClassVar[Needs] = _NEEDS

    def __init__(self, *, timeout: int = 5, workers: int | None = None) -> None:
        """Set the limits; no process is started before the first call.

        Args:
            timeout: Time limit in seconds of each of three steps: parse the reference, parse the completion, compare
                (default: math-verify's).
            workers: Number of processes; ``None``: one per core, at most 4.

        Raises:
            ValueError: If one of them is below 1.
            ImportError: If math-verify is not installed.
        """
        check_integer("timeout", timeout, minimum=1, why="it is in seconds")
        check_integer("workers", workers, minimum=1, optional=True)
        check_packages(self)
        work = WorkerSpec(
            name="math-verify",
            program=Path(__file__).with_name("math_worker.py"),
            factory="make_grader",
            arguments=(timeout,),
        )
        self.sandbox = SandboxPool(
            work,
            workers=min(4, os.cpu_count() or 1) if workers is None else workers,
            timeout=3 * timeout + 5,  # math-verify's own limits come first
        )
        self._metrics = CallMetrics("math_match")

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            ValueError: If a prompt has no answer.
            RuntimeError: If no process can be started.
        """
        answers = [required_answer(sample, "math_match") for sample in samples]
        jobs = [{"answer": answer, "text": sample.text} for answer, sample in zip(answers, samples, strict=True)]
        scores: list[float | None] = []
        for sample, outcome in zip(samples, self.sandbox.map(jobs), strict=True):
            if outcome.status == "ok" and outcome.value not in (None, 0.0, 1.0):  # SymPy may evaluate what it reads
                outcome = CallResult("error", message=f"answered {str(outcome.value)[:200]}", seconds=outcome.seconds)
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
        """Metrics of the calls since this was last called, see :class:`~rlhfkit.rewards.subprocesses.CallMetrics`."""
        return self._metrics.take()

    def answer_reader(self) -> AnswerReader:
        r"""Return what finds the last ``\boxed`` answer, or number, as text: ``1/2`` and ``0.5`` are two answers."""
        return _voted

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        self.sandbox.close()


def _voted(sample: Sample) -> str | None:
    return voted_answer(sample.text)


@cache
def _shared() -> MathMatch:
    return MathMatch()


@needs(packages=_NEEDS.packages, answer=True)
@extracts_answer(_voted)
def math_match(samples: Sequence[Sample]) -> list[float | None]:
    """1 where the completion's final answer equals the reference answer mathematically, else 0.

    :class:`MathMatch` does the same with other limits.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If a prompt has no answer.
    """
    return _shared()(samples)
