"""A warning for calls that take long and cannot be stopped because they run in the caller's thread."""

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
"""Default number of seconds that a synchronous reward may run before a warning names it."""


@contextmanager
def warn_if_slow(what: str, advice: str, *, after: float = WARN_AFTER) -> Iterator[None]:
    """Warn, from another thread, while the block runs: after ``after`` seconds, and each time that has doubled.

    Python cannot stop a thread, so a call that hangs blocks its caller for good. The warning shows the line that it is
    at.

    Args:
        what: What is being called, for the message.
        advice: What to do about it, for the message.
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
            interval = time.monotonic() - started  # the next warning comes when this time has passed again
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
