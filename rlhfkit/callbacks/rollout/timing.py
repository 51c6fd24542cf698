"""``Timing``: measure the phases of an iteration, for metrics and as a trace for a browser."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """One measured phase of an iteration."""

    name: str
    start: float
    """Seconds of :func:`time.perf_counter`."""
    seconds: float
    thread: str
    iteration: int

    @property
    def end(self) -> float:
        return self.start + self.seconds


_SAME_PHASE_SECONDS = 0.01

MOST_EVENTS = 10_000
"""Phases that are kept, so that memory does not grow with a run: those of some hundred iterations."""
_MOST_ITERATIONS = 1000  # of which sums are kept


class Timing:
    """Records named phases from any thread; they may overlap."""

    def __init__(self) -> None:
        self.events: deque[Phase] = deque(maxlen=MOST_EVENTS)
        """The last phases, in the order in which they ended."""
        self._seconds: dict[int, dict[str, float]] = {}  # of each phase, by iteration
        self._noted: dict[int, dict[str, float]] = {}  # that others measured, by iteration
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Without the lock: ranks on Ray, and spawned ones, get callbacks pickled.
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @contextmanager
    def record(self, name: str, iteration: int) -> Iterator[None]:
        """Measure the code inside the context, also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self._add(name, start, end, threading.current_thread().name, iteration)

    def _add(self, name: str, start: float, end: float, thread: str, iteration: int) -> None:
        """Add a phase, or prolong the last one if it is the same one, looked at in between."""
        last = self.events[-1] if self.events else None
        seconds = end - start
        if last and last[0] == name and last[3:] == (thread, iteration) and start - last.end < _SAME_PHASE_SECONDS:
            seconds = end - last.end
            self.events[-1] = last._replace(seconds=end - last.start)
        else:
            self.events.append(Phase(name, start, seconds, thread, iteration))
        sums = _of_iteration(self._seconds, iteration)
        sums[name] = sums.get(name, 0.0) + seconds

    def note(self, seconds: Mapping[str, float], iteration: int) -> None:
        """Keep seconds that others have measured, by name, for the metrics of an iteration."""
        with self._lock:
            _of_iteration(self._noted, iteration).update(seconds)

    def metrics(self, iteration: int) -> dict[str, float]:
        """Seconds per phase of one of the last iterations, as ``time/<phase>``."""
        with self._lock:
            measured, noted = self._seconds.get(iteration, {}), self._noted.get(iteration, {})
            return {f"time/{name}": measured.get(name, 0.0) + noted.get(name, 0.0) for name in {**measured, **noted}}

    def write_trace(self, path: str | Path) -> Path:
        """Write the last phases to a ``.json`` file in the Trace Event Format (chrome://tracing, ui.perfetto.dev)."""
        with self._lock:
            events = [
                {
                    "name": event.name,
                    "cat": "rollout",
                    "ph": "X",
                    "ts": round(event.start * 1e6),
                    "dur": round(event.seconds * 1e6),
                    "pid": os.getpid(),
                    "tid": event.thread,
                    "args": {"iteration": event.iteration},
                }
                for event in self.events
            ]
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path


def _of_iteration(sums: dict[int, dict[str, float]], iteration: int) -> dict[str, float]:
    """The sums of an iteration; those of the oldest are forgotten when there are too many."""
    if iteration not in sums and len(sums) >= _MOST_ITERATIONS:
        del sums[next(iter(sums))]
    return sums.setdefault(iteration, {})


def slowest(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds per phase on the slowest rank, from :meth:`Timing.metrics` of each rank; ranks may lack phases."""
    names = sorted({name for each in times for name in each})
    return {name: max(each.get(name, 0.0) for each in times) for name in names}
