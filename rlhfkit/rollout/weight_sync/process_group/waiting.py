"""Waits of a weight transfer: with a time limit, with a look at the other side meanwhile, and for calls that block."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Poll = Callable[[], None]
"""Raises if the other side has failed already."""

_POLL_SECONDS = 0.2


def wait_until(ready: Callable[[], bool], poll: Poll, timeout: float, late: Callable[[], str]) -> None:
    """Wait until ``ready`` is true, calling ``poll`` meanwhile.

    Raises:
        TimeoutError: With the message ``late()``, after ``timeout`` seconds.
        Exception: That of ``poll``.
    """
    now = time.monotonic()
    deadline, next_poll = now + timeout, now + _POLL_SECONDS
    pause = 1e-5  # doubled each time: at most as long as was waited already, so short waits stay short
    while not ready():
        time.sleep(pause)
        pause, now = min(2 * pause, 2e-3), time.monotonic()
        if now >= next_poll:
            next_poll = now + _POLL_SECONDS
            poll()
            if now > deadline and not ready():
                raise TimeoutError(late())


def call_with_limit(step: Callable[[], T], poll: Poll, timeout: float, late: Callable[[], str]) -> T:
    """Return the result of a call that cannot be interrupted; raises as :func:`wait_until`, and what the call raises.

    It is made in a thread of its own, where it is left behind if it is too late.
    """
    called: Future[T] = Future()

    def call() -> None:
        try:
            called.set_result(step())
        except BaseException as error:
            called.set_exception(error)

    threading.Thread(target=call, name="weight transfer", daemon=True).start()
    wait_until(called.done, poll, timeout, late)
    return called.result()
