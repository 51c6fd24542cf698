"""``math_match``: is the completion's final answer mathematically equal to the reference?

math-verify (Kydlíček and Gandenberger, https://github.com/huggingface/Math-Verify) finds the answer in the text and
compares it with SymPy. Its time limits are signal alarms, which work in a main thread only, and some of SymPy cannot be
interrupted at all; rewards run in any thread. So judging happens in processes of its own, each judgement bounded, and a
process that does not answer is killed and replaced.
"""

import atexit
import importlib.util
import json
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhfkit.data.experience import Sample
from rlhfkit.rewards.rules import required_answer

log = logging.getLogger(__name__)

_START_TIMEOUT = 120.0


class MathMatch:
    """1 where the completion's final answer equals the reference answer mathematically, else 0.

    A completion that cannot be judged in time counts as wrong; a sample whose *reference* cannot be understood is not
    scored (``None``), with a warning. LaTeX answers are found in a box or between dollar signs, plain numbers anywhere.
    """

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
        if timeout < 1:
            raise ValueError(f"timeout must be at least 1 second, got {timeout}")
        self.timeout = timeout
        self.workers = min(4, os.cpu_count() or 1) if workers is None else workers
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math_match needs math-verify: pip install 'rlhfkit[math]'")
        self._idle: queue.SimpleQueue[_Worker] | None = None
        self._lock = threading.Lock()

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples.

        Raises:
            ValueError: If a prompt has no answer.
            RuntimeError: If no judging process can be started.
        """
        answers = [str(required_answer(sample, "math_match")) for sample in samples]
        with self._lock:
            idle = self._start()
            with ThreadPoolExecutor(self.workers) as threads:
                scores = list(threads.map(lambda pair: self._judge(idle, *pair), zip(answers, samples, strict=True)))
        unclear = {answer for answer, score in zip(answers, scores, strict=True) if score is None}
        if unclear:
            log.warning(
                "math_match cannot understand these reference answers, their samples are not scored: %s", unclear
            )
        return scores

    def _start(self) -> "queue.SimpleQueue[_Worker]":
        if self._idle is None:
            self._idle = queue.SimpleQueue()
            for _ in range(self.workers):
                self._idle.put(_Worker(self.timeout))
            atexit.register(self.close)
        return self._idle

    @staticmethod
    def _judge(idle: "queue.SimpleQueue[_Worker]", answer: str, sample: Sample) -> float | None:
        worker = idle.get()
        try:
            return worker.judge(answer, sample.text)
        except TimeoutError:
            log.warning("math_match: sample of prompt %d took too long and counts as wrong", sample.prompt.index)
            return 0.0
        finally:
            idle.put(worker)

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        with self._lock:
            idle, self._idle = self._idle, None
            while idle is not None and not idle.empty():
                idle.get().kill()
        atexit.unregister(self.close)

    def __getstate__(self) -> dict[str, object]:
        """Processes stay where they are when the reward is sent elsewhere."""
        return {"timeout": self.timeout, "workers": self.workers}

    def __setstate__(self, state: dict[str, int]) -> None:
        """As freshly made."""
        self.__init__(**state)  # type: ignore[misc]  # unsound for subclasses with other arguments, which pickle their own


class _Worker:
    """One judging process, started when it is needed and again after it died."""

    def __init__(self, timeout: int) -> None:
        self.timeout = timeout
        self.process: subprocess.Popen[str] | None = None

    def judge(self, answer: str, text: str) -> float | None:
        """Ask; raises TimeoutError, and ends the process, when there is no answer in time."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"answer": answer, "text": text}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.kill()
            raise TimeoutError from None
        line = self._line(process, 3 * self.timeout + 5)
        if not line:
            self.kill()
            raise TimeoutError
        return json.loads(line)["score"]

    def _running(self) -> "subprocess.Popen[str]":
        if self.process is not None and self.process.poll() is not None:
            self.kill()  # it died on its own; this closes its pipes
        if self.process is None:
            with tempfile.TemporaryFile("w+") as errors:
                script = Path(__file__).with_name("maths_worker.py")
                self.process = subprocess.Popen(
                    [sys.executable, "-P", str(script), str(self.timeout)],  # -P: our folder's names shadow no module
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                if self._line(self.process, _START_TIMEOUT) != "ready\n":
                    self.kill()
                    errors.seek(0)
                    raise RuntimeError(
                        f"the process that judges mathematics did not start within {_START_TIMEOUT:g} s: "
                        f"{errors.read()[-2000:] or 'it said nothing'}"
                    )
        return self.process

    @staticmethod
    def _line(process: "subprocess.Popen[str]", seconds: float) -> str:
        """The next line, or nothing: the process ended, or the time is up."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if ready else ""

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.process = None


_shared: MathMatch | None = None


def math_match(samples: Sequence[Sample]) -> list[float | None]:
    """1 where the completion's final answer equals the reference answer mathematically, else 0.

    :class:`MathMatch` is the same with arguments.

    Args:
        samples: With ``prompt.answer`` set.

    Raises:
        ImportError: If math-verify is not installed.
        ValueError: If a prompt has no answer.
    """
    global _shared
    if _shared is None:
        _shared = MathMatch()
    return _shared(samples)
