"""``BackgroundRollouts``: jobs in one thread beside the training loop, with a way to hold them while weights change."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class BackgroundRollouts(Generic[T]):
    """Runs jobs one after the other in the order in which they were submitted; each has a number.

    Args:
        name: Of the thread, for people who look at a hanging process.
    """

    def __init__(self, name: str = "rollouts") -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, Callable[[], T]] = OrderedDict()
        self._done: dict[int, tuple[T | None, BaseException | None]] = {}
        self._running: int | None = None
        self._newest = -1  # that has begun
        self._pauses = 0
        self._allowed = -1  # jobs up to that number begin although jobs are paused
        self._closed = False
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> Any:
        """A copy for another process (a rank on Ray) has nothing queued; threads do not travel."""
        return type(self), (self._name,)

    def submit(self, number: int, job: Callable[[], T]) -> None:
        """Queue a job, unless one of that number was submitted and not collected yet.

        Args:
            number: Of the job.
            job: Called once, in the thread.

        Raises:
            RuntimeError: If this was closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("these background rollouts were closed")
            if number in self._done or number in self._waiting or number == self._running:
                return
            self._waiting[number] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def result(self, number: int, timeout: float) -> T:
        """Wait for a job and take its result.

        Args:
            number: Of a job that was submitted.
            timeout: Seconds.

        Raises:
            TimeoutError: If it takes longer; the message says where it was.
            KeyError: If there is no such job.
            BaseException: What the job raised.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while number not in self._done:
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
        """Inside, no job runs: the one that is running is waited for, the next one starts afterwards.

        Args:
            timeout: Seconds to wait.
            agree: Given the number of the newest job that has begun (-1: none), says up to which number jobs are run
                first. Where processes run their jobs together: the highest number of all.

        Raises:
            TimeoutError: If that takes longer.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._pauses += 1
            newest = self._newest
        try:
            last = agree(newest)
            with self._changed:
                self._allowed = max(self._allowed, last)
                self._changed.notify_all()
                while self._running is not None or self._next_allowed() is not None:
                    if not self._changed.wait(deadline - time.monotonic()):
                        raise TimeoutError(
                            f"the rollouts of iteration {self._running} did not end within {timeout:g} s, so that the "
                            "engine could not be given new weights"
                        )
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _next_allowed(self) -> int | None:
        """The next job, if it may begin."""
        number = next(iter(self._waiting), None)
        return None if number is None or (self._pauses and number > self._allowed) else number

    @property
    def pending(self) -> list[int]:
        """Numbers of the jobs that were submitted and not collected."""
        with self._changed:
            running = [] if self._running is None else [self._running]
            return sorted([*self._done, *running, *self._waiting])

    def clear(self, timeout: float) -> None:
        """Forget all jobs and their results; the one that is running is waited for.

        Args:
            timeout: Seconds.

        Raises:
            TimeoutError: If that takes longer.
        """
        with self._changed:
            self._waiting.clear()
            if not self._changed.wait_for(lambda: self._running is None, timeout):
                raise TimeoutError(f"the rollouts of iteration {self._running} did not end within {timeout:g} s")
            self._done.clear()

    def close(self, timeout: float = 60.0) -> None:
        """Forget what has not started and wait a while for what has. A second call does nothing.

        Args:
            timeout: Seconds.
        """
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._done.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._closed and self._next_allowed() is None:
                    self._changed.wait()
                if self._closed:
                    return
                self._running, job = self._waiting.popitem(last=False)
                self._newest = max(self._newest, self._running)
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:  # handed to whoever asks for the result
                error = raised
            with self._changed:
                if not self._closed:
                    self._done[self._running] = (result, error)
                self._running = None
                self._changed.notify_all()
