"""``ReadWriteLock``: lets weights change between two tokens, and never while one is computed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class ReadWriteLock:
    """Many readers or one writer of the weights; a waiting writer goes before new readers.

    Decoding takes the read lock for one token at a time, so that new weights never wait for a whole completion, and no
    token is computed from partly updated weights.

    Args:
        timeout: Seconds that one read or one write may take.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        self.timeout = timeout
        self._condition = threading.Condition()
        self._readers = 0
        self._waiting_writers = 0
        self._writing = False

    def __reduce__(self) -> Any:
        """Pickle as an unlocked lock, for ranks on Ray."""
        return type(self), (self.timeout,)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Hold the read lock.

        Raises:
            TimeoutError: If a write takes too long.
        """
        with self._condition:
            self._wait(lambda: not (self._writing or self._waiting_writers), "new weights took", "to arrive")
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the write lock.

        Raises:
            TimeoutError: If a read, or another write, takes too long.
        """
        with self._condition:
            self._waiting_writers += 1
            try:
                self._wait(lambda: not (self._writing or self._readers), "one token took", "to compute")
                self._writing = True
            finally:
                self._waiting_writers -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()

    def _wait(self, free: Callable[[], bool], what: str, ending: str) -> None:
        if not self._condition.wait_for(free, self.timeout):
            raise TimeoutError(f"{what} longer than {self.timeout:g} s {ending}")
