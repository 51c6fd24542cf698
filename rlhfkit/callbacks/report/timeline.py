"""Who works when: trainer, engines and the models that are on machines of their own."""

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.protocols import RecordsWork
from rlhfkit.trainer_parts import callbacks_of

LANES = {"engine": "engine", "logprobs": "reference", "reward": "reward model", "values": "critic", "critic": "critic"}
"""Names of lanes by the beginnings of the names of Ray actors."""
PHASES = {"generate": "sample", "compute": "compute", "update": "update"}
"""Names of phases by the methods of actors; other methods are short and left out, but those that get weights."""
WEIGHTS = ("connect", "begin_update", "finish_update")
WAITING = {"generate", "wait"}
"""Phases of the trainer in which it waits: nothing is drawn."""
MOST_SPANS = 2000
"""Spans of a phase in a lane that are drawn."""
_REPORT_SECONDS = 2.5  # Ray's workers report what they did once a second


class Interval(NamedTuple):
    """A process at work."""

    lane: str
    phase: str
    start: float
    """Seconds of :func:`time.time`."""
    end: float


class RoleTimes:
    """Who worked when in the last iterations: rank 0, the engines, and models that are elsewhere.

    What the trainer does is measured here; what Ray actors do Ray measures (``ray.timeline``), and ranks of a critic do
    themselves, by the clocks of their machines. Ray's record is read at the end of a run only, as its workers report
    once a second. A Ray that has no record of it leaves the trainer's lane alone.

    Args:
        iterations: How many are kept.
    """

    def __init__(self, iterations: int = 3) -> None:
        self.iterations = iterations
        self.intervals: list[Interval] = []
        """What was found when it was last asked for."""
        self.written = 0.0
        """When the page was written, in seconds of :func:`time.monotonic`."""
        self.first_step = 0
        self.update_seconds = 0.0
        """Of the micro-batches of this iteration so far, on this rank."""
        self._began = time.monotonic()
        self._updates: list[Interval] = []
        self._starts: list[float] = []  # of the last iterations
        self._batch_start = 0.0

    @property
    def seconds(self) -> float:
        """Since training began."""
        return time.monotonic() - self._began

    def begin(self, step: int) -> None:
        """Training begins, after ``step`` optimizer steps of an earlier run."""
        self.first_step, self._began = step, time.monotonic()

    def begin_iteration(self) -> None:
        """Note when an iteration begins, and forget what is not shown any more."""
        self._starts = [*self._starts[-self.iterations - 1 :], time.time()]
        self._updates = [one for one in self._updates if one.end > self._starts[0]]

    def begin_batch(self) -> None:
        """Note when a micro-batch begins."""
        self._batch_start = time.time()

    def end_batch(self) -> None:
        """Note when it ends."""
        self._updates.append(Interval("trainer", "update", self._batch_start, time.time()))
        self.update_seconds += self._updates[-1].end - self._batch_start

    def collect(self, trainer: L.Trainer, *, elsewhere: bool) -> None:
        """Set :attr:`intervals` to what was done in the iterations before the last one, in which nothing is sampled
        ahead any more; ``elsewhere``: also by Ray actors and ranks of a critic, which takes seconds.
        """
        found = [*self._updates, *trainer_intervals(trainer)]
        if elsewhere:
            found += actor_intervals()
            recording = [one for one in callbacks_of(trainer) if isinstance(one, RecordsWork)]
            found += [Interval(*work) for one in recording for work in one.work_elsewhere()]
        start, end = self.window
        clipped = [one._replace(start=max(one.start, start), end=min(one.end, end)) for one in found]
        self.intervals = [one for one in clipped if one.end > one.start]

    @property
    def window(self) -> tuple[float, float]:
        """The beginning and the end of the iterations that are shown, in seconds of :func:`time.time`."""
        starts = [*self._starts, time.time()]
        end = starts[-2] if len(starts) > self.iterations + 1 else starts[-1]
        last = starts.index(end)
        return starts[max(0, last - self.iterations)], end

    def busy_shares(self) -> dict[str, float]:
        """Return the share of that time in which each lane worked."""
        start, end = self.window
        shares = {}
        for lane in dict.fromkeys(one.lane for one in self.intervals):
            spans = merged((one.start, one.end) for one in self.intervals if one.lane == lane)
            shares[lane] = sum(last - first for first, last in spans) / (end - start)
        return shares

    def as_json(self) -> dict[str, Any] | None:
        """What the page draws: lanes of spans, in seconds from the beginning; ``None``: nothing was measured."""
        if not self.intervals:
            return None
        shares, (start, end) = self.busy_shares(), self.window
        lanes = ["trainer", *sorted(lane for lane in shares if lane != "trainer")]
        phases = list(dict.fromkeys(one.phase for one in self.intervals))
        spans = {
            (lane, phase): merged((one.start, one.end) for one in self.intervals if one[:2] == (lane, phase))
            for lane in lanes
            for phase in phases
        }
        return {
            "seconds": end - start,
            "iterations": min(self.iterations, len(self._starts)),
            "lanes": [
                {
                    "name": lane,
                    "busy": round(shares.get(lane, 0.0), 3),
                    "spans": [
                        [phase.replace("_", " "), round(first - start, 4), round(last - start, 4)]
                        for phase in phases
                        for first, last in spans[lane, phase][:MOST_SPANS]
                    ],
                }
                for lane in lanes
            ],
        }


def trainer_intervals(trainer: L.Trainer) -> list[Interval]:
    """Return the phases of the rollouts that the thread of the Trainer was in, and when an engine here sampled."""
    offset, thread = time.time() - time.perf_counter(), threading.current_thread().name
    found = []
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        for event in one.timing.events if isinstance(one, RolloutCallback) else ():
            span = event.start + offset, event.end + offset
            if event.name == "generate" and not one.engine.shared:
                found.append(Interval("engine", "sample", *span))
            elif event.thread == thread and event.name not in WAITING:
                found.append(Interval("trainer", event.name, *span))
    return found


def actor_intervals() -> list[Interval]:
    """Return what Ray has recorded of engines and placed models; waits until its workers have reported."""
    import sys

    if "ray" not in sys.modules:
        return []
    import ray

    if not ray.is_initialized():
        return []
    time.sleep(_REPORT_SECONDS)
    try:
        events = ray.timeline()
    except Exception:  # a Ray without a record of tasks
        return []
    return recorded_intervals(events or [])


def recorded_intervals(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """Read Ray's record: the creation of an actor has its name and its process, and each call its process."""
    names = {
        event["tid"]: created.group(1)
        for event in events
        if (created := re.match(r"task::(.+):\w+\.__init__$", str(event.get("cat"))))
    }
    lanes = _lanes(sorted(set(names.values())))
    found = []
    for event in events:
        lane, method = lanes.get(names.get(event.get("tid"), "")), str(event.get("name"))
        phase = "weight_sync" if method in WEIGHTS else PHASES.get(method)
        if lane is None or phase is None or not str(event.get("cat")).startswith("task::"):
            continue
        if lane.startswith("engine") and method == "update":
            phase = "weight_sync"
        found.append(Interval(lane, phase, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return found


def _lanes(actors: Sequence[str]) -> dict[str, str]:
    """The lane of each actor by its name; several of a role are numbered."""
    groups: dict[str, list[str]] = {}
    for name in actors:
        for beginning, lane in LANES.items():
            if re.match(rf".*\b{beginning}\b", name):
                groups.setdefault(lane, []).append(name)
                break
    return {
        name: lane if len(members) == 1 else f"{lane} {number}"
        for lane, members in groups.items()
        for number, name in enumerate(members)
    }


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time without overlaps."""
    result: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if last <= first:
            continue
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result
