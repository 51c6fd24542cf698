"""``ReadWriteLock``: weights that are read step by step, and changed between two steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ReadWriteLock:
    """Any number of readers, one at a time that changes, and whoever wants to change goes first.

    A decode loop holds the gate for one token at a time, so that new weights never wait for a whole completion, and no
    token is computed from half of them.

    Args:
        timeout: Seconds that one step or one change may take.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        self.timeout = timeout
        self._moved = threading.Condition()
        self._reading = 0
        self._waiting = 0
        self._changing = False

    def __reduce__(self) -> Any:
        """A copy for another process (a rank on Ray) starts open; locks do not travel."""
        return type(self), (self.timeout,)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, nothing changes.

        Raises:
            TimeoutError: If a change takes too long.
        """
        with self._moved:
            self._wait(lambda: not (self._changing or self._waiting), "new weights took", "to arrive")
            self._reading += 1
        try:
            yield
        finally:
            with self._moved:
                self._reading -= 1
                self._moved.notify_all()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Inside, nobody reads; steps that have begun are waited for, the next ones wait.

        Raises:
            TimeoutError: If a step, or another change, takes too long.
        """
        with self._moved:
            self._waiting += 1
            try:
                self._wait(lambda: not (self._changing or self._reading), "one token took", "to compute")
                self._changing = True
            finally:
                self._waiting -= 1
                self._moved.notify_all()
        try:
            yield
        finally:
            with self._moved:
                self._changing = False
                self._moved.notify_all()

    def _wait(self, free: Callable[[], bool], what: str, ending: str) -> None:
        if not self._moved.wait_for(free, self.timeout):
            raise TimeoutError(f"{what} longer than {self.timeout:g} s {ending}")
