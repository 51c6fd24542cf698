"""A warning for calls that do not come back, and cannot be stopped because they run in our own process."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rlhfkit.validation import check_number

log = logging.getLogger(__name__)

WARN_AFTER = 120.0
"""Seconds that a synchronous reward may run in the caller's thread before a warning names it."""


@contextmanager
def warn_if_slow(what: str, advice: str, *, after: float = WARN_AFTER) -> Iterator[None]:
    """Warn, from another thread, when the block runs long: after the given time, and each time that has doubled.

    Python cannot stop a thread, so a call that hangs keeps its caller for ever. This says which one it is and on which
    line.

    Args:
        what: What is being called, for the message.
        advice: What to do about it.
        after: Seconds until the first warning.

    Raises:
        ValueError: If ``after`` is not positive.
    """
    check_number("after", after, above=0, why="it is in seconds")
    caller = threading.get_ident()
    finished = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        interval = after
        while not finished.wait(interval):
            interval = time.monotonic() - started  # the next warning comes when the time has doubled
            frame = sys._current_frames().get(caller)
            lines = "".join(traceback.format_stack(frame)[-2:]) if frame is not None else ""
            log.warning("%s has been running for %.3g s. %s\nIt is at:\n%s", what, interval, advice, lines)

    thread = threading.Thread(target=watch, name="rlhfkit-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
