"""``BackgroundRollouts``: run jobs in a thread beside the training loop, and pause them while weights change."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class BackgroundRollouts(Generic[T]):
    """Runs numbered jobs beside the caller, one after another in the order of submission, in a thread ``name``."""

    def __init__(self, name: str = "rollouts") -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, Callable[[], T]] = OrderedDict()
        self._done: dict[int, tuple[T | None, BaseException | None]] = {}
        self._running: int | None = None
        self._newest = -1  # the newest job that has started
        self._pauses = 0
        self._allowed = -1  # jobs up to this number start even while paused
        self._closed = False
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> Any:
        """Pickle without jobs and thread, for ranks in other processes (on Ray)."""
        return type(self), (self._name,)

    def submit(self, number: int, job: Callable[[], T]) -> None:
        """Queue a job, unless its number is :attr:`pending`; raises RuntimeError after :meth:`close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("these background rollouts were closed")
            if number in self._done or number in self._waiting or number == self._running:
                return
            self._waiting[number] = job
            self._start_next()

    def result(self, number: int, timeout: float) -> T:
        """Wait up to ``timeout`` seconds for a job, return its result, and forget it; raises what the job raised.

        Raises:
            TimeoutError: If it takes longer; the message says whether it was running or waiting.
            KeyError: If there is no such job.
            RuntimeError: After :meth:`close`, also by another thread meanwhile.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while number not in self._done:
                if self._closed:
                    raise RuntimeError(f"these background rollouts were closed while job {number} was waited for")
                if number not in self._waiting and number != self._running:
                    raise KeyError(f"job {number} was never submitted")
                if not self._changed.wait(deadline - time.monotonic()):
                    state = "still running" if number == self._running else f"waiting behind job {self._running}"
                    raise TimeoutError(f"the rollouts of iteration {number} took longer than {timeout:g} s: {state}")
            result, error = self._done.pop(number)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None is what the job returned, if that is its type

    @contextmanager
    def paused(self, timeout: float, *, agree: Callable[[int], int] = int) -> Iterator[None]:
        """Wait for the running job, and start no other inside; TimeoutError if it takes more than ``timeout`` seconds.

        ``agree`` maps the number of the newest started job (-1: none) to that of the last job to run before the pause.
        Processes whose jobs work together agree on the highest number.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._pauses += 1
            newest = self._newest
        try:
            last = agree(newest)
            with self._changed:
                self._allowed = max(self._allowed, last)
                self._start_next()
                while self._running is not None or self._next_allowed() is not None:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise TimeoutError(
                            f"the rollouts of iteration {self._running} did not end within "
                            f"{timeout:g} s, so that the engine could not be given new weights"
                        )
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._start_next()

    def _next_allowed(self) -> int | None:
        """Return the number of the next job if it may start."""
        number = next(iter(self._waiting), None)
        return None if number is None or (self._pauses and number > self._allowed) else number

    @property
    def pending(self) -> list[int]:
        """Numbers of the submitted jobs whose results were not collected, in ascending order."""
        with self._changed:
            return sorted({*self._done, *self._waiting, *([] if self._running is None else [self._running])})

    def clear(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the running job, then forget all; TimeoutError if it takes longer."""
        with self._changed:
            self._waiting.clear()
            if not self._changed.wait_for(lambda: self._running is None, timeout):
                raise TimeoutError(f"the rollouts of iteration {self._running} did not end within {timeout:g} s")
            self._done.clear()

    def close(self, timeout: float = 60.0) -> None:
        """Forget all jobs and wait up to ``timeout`` seconds for the running one. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._done.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start_next(self) -> None:
        """Start the next job if it may; the caller holds the lock."""
        self._changed.notify_all()
        number = self._next_allowed()
        if self._closed or number is None or self._running is not None:
            return
        job = self._waiting.pop(number)
        self._running, self._newest = number, max(self._newest, number)
        self._thread = threading.Thread(target=self._work, args=(number, job), name=self._name, daemon=True)
        self._thread.start()

    def _work(self, number: int, job: Callable[[], T]) -> None:
        result, error = None, None
        try:
            result = job()
        except BaseException as raised:  # raised again by result()
            error = raised
        with self._changed:
            if not self._closed:
                self._done[number] = (result, error)
            self._running = None
            self._start_next()
