"""``Timing``: measure the phases of an iteration, for metrics and as a trace for a browser."""

import json
import os
import threading
import time
from collections import defaultdict
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
        """When it ended, like ``start``."""
        return self.start + self.seconds


_SAME_PHASE_SECONDS = 0.01


class Timing:
    """Records named phases from any thread; they may overlap."""

    def __init__(self) -> None:
        self.events: list[Phase] = []
        """All phases so far, in the order in which they ended."""
        self._seconds: dict[int, dict[str, float]] = defaultdict(dict)  # that others measured, by iteration
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Without the lock: ranks on Ray, and spawned ones, get callbacks pickled.
        return {"events": self.events, "seconds": dict(self._seconds)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.events, self._lock = state["events"], threading.Lock()
        self._seconds = defaultdict(dict, state.get("seconds", {}))

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
        if last and last[0] == name and last[3:] == (thread, iteration) and start - last.end < _SAME_PHASE_SECONDS:
            self.events[-1] = last._replace(seconds=end - last.start)
        else:
            self.events.append(Phase(name, start, end - start, thread, iteration))

    def note(self, seconds: Mapping[str, float], iteration: int) -> None:
        """Keep seconds that others have measured, by name, for the metrics of an iteration."""
        with self._lock:
            self._seconds[iteration] |= seconds

    def metrics(self, iteration: int) -> dict[str, float]:
        """Seconds per phase of an iteration, as ``time/<phase>``."""
        totals: dict[str, float] = defaultdict(float)
        with self._lock:
            for event in self.events:
                if event.iteration == iteration:
                    totals[f"time/{event.name}"] += event.seconds
            for name, seconds in self._seconds.get(iteration, {}).items():
                totals[f"time/{name}"] += seconds
        return dict(totals)

    def write_trace(self, path: str | Path) -> Path:
        """Write all phases to a ``.json`` file in the Trace Event Format (chrome://tracing, ui.perfetto.dev)."""
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


def slowest(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds per phase on the slowest rank, from :meth:`Timing.metrics` of each rank; ranks may lack phases."""
    names = sorted({name for each in times for name in each})
    return {name: max(each.get(name, 0.0) for each in times) for name in names}
