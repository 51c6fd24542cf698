"""``Sandbox``: child processes for calls that may hang, die, or eat memory; none of which reaches the caller.

Each process has one call in flight. One that does not answer in time is killed, with everything it has started, and
replaced; the other calls never notice. (A pool of ``concurrent.futures`` cannot do that: two calls that hang on two
workers keep both for ever.) Answers come back as JSON, never pickled, so that reading them runs nobody's code.
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

from rlhfkit.rewards.sandbox.isolation import Backend, chosen_backend, require
from rlhfkit.rewards.sandbox.process import Limits, Outcome, SandboxProcess, Work
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

Ask = Callable[[Any, float], Outcome]
Result = TypeVar("Result")

START_TIMEOUT = 120.0
"""Seconds until a process must be ready, its imports done."""


class Sandbox:
    """A pool of persistent child processes that all run the same function.

    Args:
        work: What they run.
        workers: How many.
        timeout: Seconds for one call.
        limits: What each may use.
        start_timeout: Seconds until a process must be ready.
        fresh: A new process for each call, so that none finds what another left behind.
        backend: Who puts up the walls: ``"bubblewrap"``, ``"namespaces"`` (our own), or ``"auto"``: bubblewrap where it
            is installed and allowed, else our own.
        allow_weak: Whether to go on, with a warning, where walls are missing that the work requires; else that is an
            error at the first call.

    Raises:
        ValueError: If a number is out of range, or the backend is none.
        RuntimeError: If bubblewrap is asked for and cannot be used.
        OSError: On Windows, which has none of what this needs.
    """

    def __init__(
        self,
        work: Work,
        *,
        workers: int,
        timeout: float,
        limits: Limits | None = None,
        start_timeout: float = START_TIMEOUT,
        fresh: bool = False,
        backend: Backend = "auto",
        allow_weak: bool = False,
    ) -> None:
        check_integer("workers", workers, minimum=1)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        try:
            import resource  # noqa: F401  # what the child processes limit themselves with
        except ImportError as error:
            raise OSError("sandboxes need Linux or macOS; on Windows use WSL") from error
        self.work = work
        self.workers = workers
        self.timeout = timeout
        self.limits = limits or Limits()
        self.fresh = fresh
        self.backend: Backend = backend
        self.allow_weak = allow_weak
        chosen_backend(backend)
        self._start_timeout = start_timeout
        self._idle: queue.SimpleQueue[SandboxProcess] = queue.SimpleQueue()
        options: dict[str, Any] = {"backend": backend, "allow_weak": allow_weak}
        self.processes = tuple(SandboxProcess(work, self.limits, start_timeout, **options) for _ in range(workers))
        """All of them, running or not."""
        for process in self.processes:
            self._idle.put(process)
        self._closing = threading.Lock()
        self._warned = False
        # When nobody holds us any more, and when Python ends; not in a fork, whose copy of us has no processes.
        weakref.finalize(self, _end_own, self.processes, os.getpid())

    def run(self, job: Any, *, timeout: float | None = None) -> Outcome:
        """One call, in the next process that is free.

        Args:
            job: Argument of the function; picklable.
            timeout: Seconds for this call; ``None``: the usual.

        Raises:
            RuntimeError: If no process can be started.
        """
        return self._session(lambda ask: ask(job, self.timeout if timeout is None else timeout))

    def map(self, jobs: Sequence[Any], *, timeout: float | None = None) -> list[Outcome]:
        """Calls at the same time, as many as there are workers.

        Args:
            jobs: Arguments of the function.
            timeout: Seconds for each call; ``None``: the usual.

        Returns:
            Outcomes in the order of the jobs.

        Raises:
            RuntimeError: If a process cannot be started.
        """
        limit = self.timeout if timeout is None else timeout
        return self.sessions([lambda ask, job=job: ask(job, limit) for job in jobs])  # type: ignore[misc]  # a default in a lambda

    def sessions(self, tasks: Sequence[Callable[[Ask], Result]]) -> list[Result]:
        """Tasks at the same time, each with a process to itself that it may call several times.

        Args:
            tasks: Each gets a function that calls the process with a job and a time limit in seconds. A process that
                ends is replaced by a new one at the next call.

        Returns:
            What they return, in their order.

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

    def _session(self, task: Callable[[Ask], Result]) -> Result:
        process = self._idle.get()  # each call is bounded, so this is

        def ask(job: Any, timeout: float) -> Outcome:
            outcome = process.ask(job, timeout)
            self._warn_of_missing_walls(process)
            return outcome

        try:
            return task(ask)
        finally:
            if self.fresh:
                process.end()
            self._idle.put(process)

    @property
    def walls(self) -> list[str] | None:
        """What stands around the processes beside resource limits; ``None`` before the first has started."""
        return next((process.walls for process in self.processes if process.walls is not None), None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Processes stay where they are when it is sent elsewhere."""
        options = ("workers", "timeout", "limits", "fresh", "backend", "allow_weak")
        given = {name: getattr(self, name) for name in options} | {"start_timeout": self._start_timeout}
        return partial(Sandbox, self.work, **given), ()

    def _warn_of_missing_walls(self, process: SandboxProcess) -> None:
        """Say once what is missing though it is required, or was asked for."""
        network = () if self.limits.network else ("network",)
        missing = require(self.work.name, dict.fromkeys([*self.work.required, *network]), process.walls or ())
        if missing and not self._warned:
            self._warned = True
            log.warning("%s", missing)

    def close(self) -> None:
        """End the processes when their calls have ended; the next call starts new ones."""
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
        process.end()
