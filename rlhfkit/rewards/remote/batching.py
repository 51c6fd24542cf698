"""``Batcher``: score requests that arrive at about the same time in one batch, in one thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlhfkit.data.types import Sample
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

Scores = list[float | None]


@dataclass
class _Request:
    samples: list[Sample]
    scores: "Future[Scores]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class Batcher:
    """Collects samples of several requests and scores them with one call.

    A batch is closed when it has ``max_batch`` samples or its first request is ``max_wait`` seconds old. A request is
    never split. If a batch fails, its requests are scored one by one, so that only those that cause an error fail;
    after a timeout all fail. A single thread scores, so a model needs no locks.
    """

    def __init__(
        self, score: Callable[[Sequence[Sample]], Scores], *, max_batch: int = 256, max_wait: float = 0.005
    ) -> None:
        """Set the function that scores, and the limits; raises ``ValueError`` if one is out of range."""
        check_integer("max_batch", max_batch, minimum=1)
        check_number("max_wait", max_wait, minimum=0, why="it is in seconds")
        self.score = score
        self.max_batch = max_batch
        self.max_wait = max_wait
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._scoring_since: float | None = None

    @property
    def scoring_seconds(self) -> float:
        """Seconds since the current batch started; 0 when none is being scored."""
        since = self._scoring_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread."""
        # A daemon: a reward that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="rlhfkit-batcher", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Score the waiting requests, then end the thread; wait for it up to ``timeout`` seconds."""
        if self._thread is None:
            return
        self._requests.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("a batch of rewards is still being scored after %g s; it is left behind", timeout)
        self._thread = None

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Add a request and return a future of its scores; if cancelled before its batch starts, it is not scored."""
        request = _Request(list(samples))
        self._requests.put(request)
        return request.scores

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            running = [request for request in batch if request.scores.set_running_or_notify_cancel()]
            if running:
                self._scoring_since = time.monotonic()
                self._score(running)
                self._scoring_since = None

    def _next_batch(self) -> list[_Request] | None:
        """Wait for the next batch; ``None`` after :meth:`close`."""
        first = self._requests.get()
        if first is None:
            return None
        batch, count = [first], len(first.samples)
        while count < self.max_batch:
            try:
                request = self._requests.get(timeout=max(first.arrived + self.max_wait - time.monotonic(), 0))
            except queue.Empty:
                break
            if request is None:
                self._requests.put(None)  # for the next round
                break
            batch.append(request)
            count += len(request.samples)
        return batch

    def _score(self, batch: list[_Request]) -> None:
        try:
            scores = self.score([sample for request in batch for sample in request.samples])
        except BaseException as error:  # SystemExit too: it would end this thread, and no request would be answered
            if len(batch) == 1 or isinstance(error, TimeoutError):
                fault = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                for request in batch:
                    request.scores.set_exception(fault)
                return
            log.warning("a batch of %d requests failed (%s: %s): one by one", len(batch), type(error).__name__, error)
            for request in batch:
                self._score([request])
            return
        start = 0
        for request in batch:
            end = start + len(request.samples)
            request.scores.set_result(scores[start:end])
            start = end
