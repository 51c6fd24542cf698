"""``WorkerReward``: a reward in worker processes, so that scoring does not hold up the training process.

Python runs one thread of a process at a time. A reward in plain Python that scores in the thread of ``max_staleness``
takes its time from the training loop; in a process of its own it does not. For rewards that may misuse the machine see
:class:`~rlhfkit.rewards.SandboxedReward`; here nothing is confined, and samples are whole.
"""

import contextlib
import json
import logging
import os
import pickle
import pkgutil
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    TIMEOUT,
    OnFailure,
    Reward,
    evaluate,
    reward_after_failure,
    reward_metrics,
    reward_name,
    tell_progress,
)
from rlhfkit.rewards.call_metrics import RewardElsewhere
from rlhfkit.rewards.sandbox import START_TIMEOUT, CallResult
from rlhfkit.rewards.sandbox.reward import check_importable
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

_CHECK_EVERY = 0.5  # seconds between looks at whether a process still lives
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from rlhfkit.rewards.workers import serve; serve(int(sys.argv[1]))"
)


class WorkerReward(RewardElsewhere):
    """Runs any importable reward in worker processes, which import rlhfkit as the trainer does and are not confined.

    The reward, its parts and its metrics are what they are in the training process; other changes to samples are lost.
    All samples of a prompt go to the same process in one call, so rewards that compare them work. A process that ends
    is replaced, and its samples are scored once more.

    Example::

        RolloutCallback(WorkerReward("my_rewards.grade"), max_staleness=1, sampling=sampling)
        WorkerReward(WeightedSum(correct=exact_match, style=Style("strict")), workers=4, timeout=60)
    """

    def __init__(
        self,
        reward: str | Reward,
        *,
        workers: int = 1,
        timeout: float = TIMEOUT,
        on_failure: OnFailure = "stop",
        start_timeout: float = START_TIMEOUT,
        name: str | None = None,
    ) -> None:
        """Set what to run; no process is started before the first call.

        Args:
            reward: Dotted name of a reward (sync or async), or a reward that can be pickled and imported, so not one
                that the running script or notebook defines.
            workers: Number of processes, among which the prompts of a call are divided.
            timeout: Time limit in seconds of a process for its part of a call; then it is killed.
            on_failure: What happens to the samples of a process that took too long, ended twice, or whose reward
                raised: ``"stop"`` (an error), ``"mask"`` (not trained on), or a number (their reward).
            start_timeout: Seconds until a process has imported the reward.
            name: Name in logs; ``None``: the reward's.

        Raises:
            ValueError: If an argument is out of range, or the reward cannot be imported by another process.
        """
        check_integer("workers", workers, minimum=1)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        resolved = _resolved(reward)
        check_importable(resolved)
        super().__init__(resolved, on_failure, name=name, calls="/worker")
        self.workers = workers
        self.timeout = timeout
        self._start_timeout = start_timeout
        self._processes = [_Process(self.name, resolved, timeout, start_timeout) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        # Stop the processes when the reward is collected or Python exits; but not in a fork, which does not own them.
        weakref.finalize(self, _end_own, self._processes, os.getpid())

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples; a composite reward sets their ``reward_parts``.

        Raises:
            RewardError: If the reward fails and ``on_failure`` is ``"stop"``.
            RuntimeError: If no process can be started, or the reward cannot be imported there.
        """
        if not samples:
            return []
        parts = _divide(samples, self.workers)
        threads = ThreadPoolExecutor(len(parts), thread_name_prefix="rlhfkit-worker-reward")
        try:
            scored = list(threads.map(lambda rows: self._score([samples[row] for row in rows]), parts))
        finally:
            threads.shutdown(cancel_futures=True)
        rewards: list[float | None] = [None] * len(samples)
        for rows, values in zip(parts, scored, strict=True):
            for row, value in zip(rows, values, strict=True):
                rewards[row] = value
        return rewards

    def _score(self, samples: list[Sample]) -> list[float | None]:
        """Score samples in the next free process."""
        request = pickle.dumps((samples, self._progress))
        process = self._idle.get()  # does not block forever, as each call has a time limit
        try:
            outcome = process.call(request)
            if outcome.status == "died":
                log.warning("%s; its samples are scored once more in a new one", outcome.message)
                outcome = process.call(request)
        finally:
            self._idle.put(process)
        answer = outcome.value if outcome.status == "ok" else {}
        self._calls.add(outcome, answer.get("metrics"))
        self.set_parts(samples, answer.get("parts"))
        if outcome.status != "ok":
            return self._failed(samples, outcome)
        values: list[float | None] = outcome.value["values"]
        return values

    def _failed(self, samples: list[Sample], outcome: CallResult) -> list[float | None]:
        prompts = ", ".join(str(index) for index in dict.fromkeys(sample.prompt.index for sample in samples))
        message = f"{outcome.message} (scoring {len(samples)} samples of prompts {prompts})"
        value = reward_after_failure(self.on_failure, message)
        became = "are not trained on" if value is None else f"got the reward {value}"
        log.warning("%d samples %s: %s", len(samples), became, message)
        return [value] * len(samples)

    def close(self) -> None:
        """Stop the processes when their calls have returned; the next call starts new ones."""
        taken = [self._idle.get() for _ in self._processes]
        for process in taken:
            process.stop()
            self._idle.put(process)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the processes: the copy starts its own."""
        options = {name: getattr(self, name) for name in ("workers", "timeout", "on_failure", "name")}
        return partial(WorkerReward, self.reward, start_timeout=self._start_timeout, **options), ()


class _Process:
    """One worker process as the trainer sees it; one call at a time."""

    def __init__(self, name: str, reward: Reward, timeout: float, start_timeout: float) -> None:
        self._what = f"the process of reward {name!r}"
        self._setup = pickle.dumps((reward, timeout))
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, request: bytes) -> CallResult:
        """Send a pickled request and wait for the rewards; raises RuntimeError if no process can be started."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._exchange(request, self._timeout)

    def _start(self) -> None:
        self.stop()
        self._connection, theirs = Pipe()
        arguments = [str(theirs.fileno()), json.dumps([os.path.abspath(entry) for entry in sys.path])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.PIPE,  # the process ends when it closes, also if the trainer is killed
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ready = self._exchange(self._setup, self._start_timeout)
        if ready.status != "ok":
            self.stop()
            raise RuntimeError(f"a worker process could not be started: {ready.message}")

    def _exchange(self, request: bytes, timeout: float) -> CallResult:
        """Send a message and wait for the answer; a process that gives none in time is killed."""
        assert self._connection is not None
        assert self._process is not None
        started, expired = time.monotonic(), threading.Event()

        def expire() -> None:  # which also ends a send that blocks
            expired.set()
            self._kill()

        timer = threading.Timer(timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(_CHECK_EVERY):
                if self._process.poll() is not None and not self._connection.poll(0):
                    raise EOFError
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return self._lost(timeout if expired.is_set() else None, time.monotonic() - started)
        except BaseException:  # an interrupt, after which the answer would be taken for that of the next call
            self.stop()
            raise
        finally:
            timer.cancel()
        seconds = time.monotonic() - started
        if "error" in answer:
            return CallResult("error", message=f"{self._what}: {answer['error']}", seconds=seconds)
        return CallResult("ok", value=answer, seconds=seconds)

    def _lost(self, timeout: float | None, seconds: float) -> CallResult:
        """What a process that has ended means; ``timeout`` if it was killed after that time."""
        if timeout is None and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # for its own exit code; it has closed the connection already
        code = self.stop()
        if timeout is not None:
            return CallResult("timeout", message=f"{self._what} did not answer within {timeout:g} s", seconds=seconds)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return CallResult("died", message=f"{self._what} {how}", seconds=seconds)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what the reward has started

    def stop(self) -> int:
        """End the process; returns its exit code."""
        process, connection = self._process, self._connection
        if process is None or connection is None:
            return 0
        self._kill()
        code = process.wait()
        self._process = self._connection = None
        connection.close()
        assert process.stdin is not None
        process.stdin.close()
        return code


def _resolved(reward: str | Reward) -> Reward:
    """Import a reward that is given by its name."""
    if not isinstance(reward, str):
        return reward
    try:
        found: Reward = pkgutil.resolve_name(reward)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward={reward!r} cannot be imported ({error}): give a name like 'my_rewards.grade'"
        ) from error
    return found


def _divide(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Rows of samples in at most ``count`` parts of about equal size; those of a prompt stay together."""
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.prompt.index, []).append(row)
    parts: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    for rows in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(rows)
    return parts


def _end_own(processes: Sequence[_Process], owner: int) -> None:
    if os.getpid() == owner:
        for process in processes:
            process.stop()


# ---------------------------------------------------------------------- in the worker process


def serve(descriptor: int) -> None:
    """Score what arrives on a connection until the trainer closes it: the program of a worker process."""
    os.set_inheritable(descriptor, False)  # a process that the reward starts must not hold it open
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    logging.basicConfig(level=logging.WARNING)
    with Connection(descriptor) as connection:
        answer, reward, timeout = _load(connection.recv_bytes())
        connection.send_bytes(json.dumps(answer).encode())
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(json.dumps(_answer(reward, request, timeout)).encode())


def _end_with_trainer() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _load(setup: bytes) -> tuple[dict[str, Any], Any, float]:
    """Import the reward; returns the answer to the trainer, the reward, and the time limit of async rewards."""
    try:
        reward, timeout = pickle.loads(setup)
        return {}, reward, timeout
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, None, TIMEOUT


def _answer(reward: Any, request: bytes, timeout: float) -> dict[str, Any]:
    """Score pickled samples, with how far training is; returns rewards, parts and metrics, or the error."""
    try:
        samples, progress = pickle.loads(request)
        return score(reward, samples, progress, timeout)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}


def score(reward: Any, samples: list[Sample], progress: dict[str, int] | None, timeout: float) -> dict[str, Any]:
    """Return the values of samples, their ``reward_parts``, and the reward's metrics, as JSON."""
    if progress is not None:
        tell_progress(reward, **progress)
    name = reward_name(reward)
    for sample in samples:
        sample.reward_parts = {}
    values = evaluate({name: reward}, samples, timeout=timeout)[name]
    metrics = {key: float(value) for key, value in reward_metrics(reward).items()}
    return {"values": values, "parts": [sample.reward_parts for sample in samples], "metrics": metrics}
