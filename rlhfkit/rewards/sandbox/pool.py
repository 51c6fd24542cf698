"""``SandboxPool``: child processes for calls that may hang, crash or use up memory.

Each process runs one call at a time. One that takes too long is killed with all it has started, and replaced, which
``concurrent.futures`` cannot do; other calls go on. Answers are JSON, never pickles, so parsing them runs no code.
"""

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from rlhfkit.rewards.sandbox.isolation import missing_isolation
from rlhfkit.rewards.sandbox.process import CallResult, ResourceLimits, SandboxProcess, WorkerSpec
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

CallWorker = Callable[[Any, float], CallResult]
Result = TypeVar("Result")

START_TIMEOUT = 120.0
"""Default number of seconds until a process must be ready, its imports done."""


class SandboxPool:
    """A pool of persistent child processes that all run the same function.

    Args:
        spec: What they run.
        workers: Number of processes.
        timeout: Time limit of one call in seconds.
        limits: Resource limits of each.
        start_timeout: Seconds until a process must be ready.
        fresh_process: Start a new process for each call, so that no call sees what another left behind.
        allow_partial_isolation: Warn if a layer is missing that the worker requires, instead of raising an error at the
            first call.

    Raises:
        ValueError: If a number is out of range.
        OSError: On Windows, which is not supported.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        workers: int,
        timeout: float,
        limits: ResourceLimits | None = None,
        start_timeout: float = START_TIMEOUT,
        fresh_process: bool = False,
        allow_partial_isolation: bool = False,
    ) -> None:
        check_integer("workers", workers, minimum=1)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        try:
            import resource  # noqa: F401  # what the child processes limit themselves with
        except ImportError as error:
            raise OSError("sandboxes need Linux or macOS; on Windows use WSL") from error
        self.spec = spec
        self.workers = workers
        self.timeout = timeout
        self.limits = limits or ResourceLimits()
        self.fresh_process = fresh_process
        self.allow_partial_isolation = allow_partial_isolation
        self._start_timeout = start_timeout
        self._idle: queue.SimpleQueue[SandboxProcess] = queue.SimpleQueue()
        self.processes = tuple(
            SandboxProcess(spec, self.limits, start_timeout, allow_partial_isolation=allow_partial_isolation)
            for _ in range(workers)
        )
        """All processes, running or not."""
        for process in self.processes:
            self._idle.put(process)
        self._closing = threading.Lock()
        self._warned = False
        # Stop the processes when the pool is collected or Python exits; but not in a fork, which does not own them.
        weakref.finalize(self, _end_own, self.processes, os.getpid())

    def run(self, job: Any, *, timeout: float | None = None) -> CallResult:
        """Make one call, in the next free process; see :meth:`map`."""
        return self._session(lambda ask: ask(job, self.timeout if timeout is None else timeout))

    def map(self, jobs: Sequence[Any], *, timeout: float | None = None) -> list[CallResult]:
        """Make several calls, as many concurrently as there are workers.

        Args:
            jobs: Arguments of the function; picklable.
            timeout: Time limit of each call in seconds; ``None``: the pool's.

        Returns:
            Results in the order of the jobs.

        Raises:
            RuntimeError: If a process cannot be started.
        """
        limit = self.timeout if timeout is None else timeout
        return self.run_sessions([lambda ask, job=job: ask(job, limit) for job in jobs])  # type: ignore[misc]  # a default in a lambda

    def run_sessions(self, tasks: Sequence[Callable[[CallWorker], Result]]) -> list[Result]:
        """Run tasks concurrently, each with a process to itself, and return their results in order.

        A task gets a function that calls its process with a job and a time limit in seconds. A process that has ended
        is replaced at the next call.

        Raises:
            RuntimeError: If a process cannot be started.
        """
        if not tasks:
            return []
        threads = ThreadPoolExecutor(min(self.workers, len(tasks)), thread_name_prefix="rlhfkit-sandbox")
        try:
            return list(threads.map(self._session, tasks))
        finally:
            threads.shutdown(cancel_futures=True)  # after an error the rest is not tried

    def _session(self, task: Callable[[CallWorker], Result]) -> Result:
        process = self._idle.get()  # does not block forever, as each call has a time limit

        def call(job: Any, timeout: float) -> CallResult:
            outcome = process.call(job, timeout)
            self._warn_of_missing_layers(process)
            return outcome

        try:
            return task(call)
        finally:
            try:
                if self.fresh_process:
                    process.stop()
            finally:  # whatever happens: the next call waits for it
                self._idle.put(process)

    @property
    def isolation(self) -> list[str] | None:
        """Active isolation layers; ``None`` before the first process has started."""
        return next((process.isolation for process in self.processes if process.isolation is not None), None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the processes: the copy starts its own."""
        options = ("workers", "timeout", "limits", "fresh_process", "allow_partial_isolation")
        given = {name: getattr(self, name) for name in options} | {"start_timeout": self._start_timeout}
        return partial(SandboxPool, self.spec, **given), ()

    def _warn_of_missing_layers(self, process: SandboxProcess) -> None:
        """Warn once if a required layer is missing, or the network could not be disabled as asked."""
        network = () if self.limits.network or not self.spec.confined else ("network",)
        missing = missing_isolation(
            self.spec.name, dict.fromkeys([*self.spec.required, *network]), process.isolation or ()
        )
        if missing and not self._warned:
            self._warned = True
            log.warning("%s", missing)

    def close(self) -> None:
        """Stop the processes when their calls have returned; the next call starts new ones."""
        with self._closing:
            taken = [self._idle.get() for _ in self.processes]
            _end(taken)
            for process in taken:
                self._idle.put(process)


def _end_own(processes: Sequence[SandboxProcess], owner: int) -> None:
    if os.getpid() == owner:
        _end(processes)


def _end(processes: Sequence[SandboxProcess]) -> None:
    for process in processes:
        process.stop()
