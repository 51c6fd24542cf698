"""``RoleTimeline``: draw who works when: trainer, engines and the models that are on machines of their own."""

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.protocols import RecordsWork
from rlhfkit.validation import check_integer

LANES = {"engine": "engine", "logprobs": "reference", "reward": "reward model", "values": "critic", "critic": "critic"}
"""Names of lanes by the beginnings of the names of Ray actors."""
PHASES = {"generate": "sample", "compute": "compute", "update": "update"}
"""Names of phases by the methods of actors; other methods are short and left out, but those that get weights."""
WEIGHTS = ("connect", "begin_update", "finish_update")
WAITING = {"generate", "wait"}
"""Phases of the trainer in which it waits: nothing is drawn."""
COLORS = {
    "update": "#d1495b",
    "prepare": "#edae49",
    "share": "#b0b0b0",
    "score": "#8d6a9f",
    "weight_sync": "#30638e",
    "sample": "#66a182",
    "compute": "#2e4057",
}
_REPORT_SECONDS = 2.5  # Ray's workers report what they did once a second


class Interval(NamedTuple):
    """A process at work."""

    lane: str
    phase: str
    start: float
    """Seconds of :func:`time.time`."""
    end: float


class RoleTimeline(Callback):
    """Draw who worked when in the last iterations, as a PNG: rank 0, the engines, and placed models, a lane each.

    What the trainer did is measured here; what Ray actors did Ray measures (``ray.timeline``), and ranks of a critic do
    themselves, by the clocks of their machines. A Ray that has no record of it leaves the trainer's lane alone.

    Example::

        L.Trainer(callbacks=[rollouts, RoleTimeline("timeline.png")])

    Args:
        path: The PNG; relative paths are under ``trainer.log_dir``, or the working directory without a logger.
        iterations: How many are drawn: those before the last one, in which nothing is sampled ahead any more.
        title: Title of the figure.

    Attributes:
        intervals: What was drawn, after the run.
        saved: Path of the PNG; ``None`` before it was written.

    Raises:
        ValueError: If ``iterations`` is below 1.
    """

    def __init__(self, path: str = "timeline.png", *, iterations: int = 3, title: str | None = None) -> None:
        check_integer("iterations", iterations, minimum=1)
        self.path = path
        self.iterations = iterations
        self.title = title
        self.intervals: list[Interval] = []
        self.saved: Path | None = None
        self._updates: list[Interval] = []
        self._starts: list[float] = []  # of the last iterations
        self._batch_start = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note when an iteration begins, and forget what is not drawn any more."""
        self._starts = [*self._starts[-self.iterations :], time.time()]
        self._updates = [one for one in self._updates if one.end > self._starts[0]]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when a micro-batch begins."""
        self._batch_start = time.time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note when it ends."""
        self._updates.append(Interval("trainer", "update", self._batch_start, time.time()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Collect what everybody did, and draw it."""
        if not trainer.is_global_zero or not self._starts:
            return
        self._starts.append(time.time())
        elsewhere = pl_module.work_elsewhere() if isinstance(pl_module, RecordsWork) else []
        found = [
            *self._updates,
            *trainer_intervals(trainer),
            *actor_intervals(),
            *(Interval(*one) for one in elsewhere),
        ]
        start, end = self._window()
        clipped = [one._replace(start=max(one.start, start), end=min(one.end, end)) for one in found]
        self.intervals = [one for one in clipped if one.end > one.start]
        self.saved = self._draw(Path(trainer.log_dir or ".") / self.path)

    def busy_shares(self) -> dict[str, float]:
        """Return the share of the drawn time in which each lane worked."""
        start, end = self._window()
        lanes = dict.fromkeys(one.lane for one in self.intervals)
        shares = {}
        for lane in lanes:
            spans = merged((one.start, one.end) for one in self.intervals if one.lane == lane)
            shares[lane] = sum(last - first for first, last in spans) / (end - start)
        return shares

    def _window(self) -> tuple[float, float]:
        """The beginning and the end of the iterations that are drawn."""
        end = self._starts[-2] if len(self._starts) > self.iterations + 1 else self._starts[-1]
        last = self._starts.index(end)
        return self._starts[max(0, last - self.iterations)], end

    def _draw(self, path: Path) -> Path:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        shares, (start, end) = self.busy_shares(), self._window()
        lanes = ["trainer", *sorted(lane for lane in shares if lane != "trainer")]
        figure = Figure(figsize=(10, 1.6 + 0.55 * len(lanes)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for row, lane in enumerate(lanes):
            for phase in COLORS:
                some = [(one.start, one.end) for one in self.intervals if (one.lane, one.phase) == (lane, phase)]
                spans = [(first - start, last - first) for first, last in merged(some)]
                axes.broken_barh(spans, (row - 0.36, 0.72), facecolor=COLORS[phase])
        for begin in [one for one in self._starts if start <= one < end]:
            axes.axvline(begin - start, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(lanes)), [f"{lane}\n{shares[lane]:.0%} busy" for lane in lanes])
        axes.invert_yaxis()
        axes.set_xlim(0, end - start)
        axes.set_xlabel("seconds; dotted: an iteration of the trainer begins")
        axes.spines[["top", "right"]].set_visible(False)
        shown = [phase for phase in COLORS if any(one.phase == phase for one in self.intervals)]
        handles = [Patch(color=COLORS[phase], label=phase.replace("_", " ")) for phase in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        if self.title:
            axes.set_title(self.title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        return path


def trainer_intervals(trainer: L.Trainer) -> list[Interval]:
    """Return the phases of the rollouts that the thread of the Trainer was in."""
    offset, thread = time.time() - time.perf_counter(), threading.current_thread().name
    rollouts = [one for one in trainer.callbacks if isinstance(one, RolloutCallback)]  # type: ignore[attr-defined]
    events = [event for one in rollouts for event in one.timing.events if event.thread == thread]
    return [
        Interval("trainer", event.name, event.start + offset, event.end + offset)
        for event in events
        if event.name not in WAITING
    ]


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
