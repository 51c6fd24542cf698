"""``StallDetector``: says what everybody is doing when nothing gets finished, and ends the waiting at a limit."""

import logging
import time
from collections.abc import Callable

from rlhfkit.rollout.errors import CURE, StallError

log = logging.getLogger(__name__)


class StallDetector:
    """Told of progress by whoever waits; asked by him at least once a second.

    Args:
        report: The state of every queue and engine, in words.
        report_after: Seconds without progress after which the report is logged, and again each time they pass.
        timeout: Seconds without progress after which waiting ends.
        clock: Seconds; for tests.
    """

    def __init__(
        self,
        report: Callable[[], str],
        *,
        report_after: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._report_after = report_after
        self._timeout = timeout
        self._clock = clock
        self._last = clock()
        self._reports = 0

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._last

    def progress(self) -> None:
        """Something was finished."""
        self._last, self._reports = self._clock(), 0

    def check(self, waiting_for: str) -> None:
        """Log, or end the waiting, if it is time.

        Args:
            waiting_for: For the messages: "12 of 64 requests".

        Raises:
            StallError: At the limit, with the report.
        """
        idle = self.idle
        if idle >= self._timeout:
            raise StallError(
                f"no request was finished for {self._timeout:g} s; waiting for {waiting_for}: engines are stopped, "
                "overloaded, or the limit is too low (VLLMPool(generate_timeout=...)).\n"
                f"{self._report()}\n{CURE}"
            )
        if idle >= self._report_after * (self._reports + 1):
            self._reports = int(idle // self._report_after)
            log.warning(
                "no request was finished for %.0f s; waiting for %s, at most until %g s have passed.\n%s",
                *(idle, waiting_for, self._timeout, self._report()),
            )
