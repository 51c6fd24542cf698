"""What a run's report holds, and the HTML page that shows it; a page is read back as data.

A page is one file without anything from a network: its data are JSON in a ``<script>`` element. So that it stays below
5 MB however long a run is, curves are thinned, and samples of earlier iterations are left out.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
MOST_POINTS = 1000
"""Points of a curve; those of a longer run are averaged in pairs."""
SAMPLE_BYTES = 2_500_000
"""Largest JSON of all samples; beyond it every second of the earlier iterations is left out."""
BINS = 40
"""Bins of a distribution."""
_TEMPLATE = Path(__file__).with_name("page.html")
_BEGIN, _END = '<script type="application/json" id="data">', "</script>"


@dataclass
class Curve:
    """A metric over the run."""

    xs: list[float] = field(default_factory=list)
    ys: list[float | None] = field(default_factory=list)
    """``None`` where it was not finite."""

    def add(self, x: float, y: float) -> None:
        """Add a point; a second one of the same place replaces the first."""
        value = float(f"{y:.5g}") if math.isfinite(y) else None
        if self.xs and self.xs[-1] >= x:
            self.ys[-1] = value
            return
        self.xs.append(x)
        self.ys.append(value)
        if len(self.xs) > MOST_POINTS:
            self._thin()

    def _thin(self) -> None:
        """Average pairs of neighbours, each at the place of its later point; the last point stays."""
        last = self.xs.pop(), self.ys.pop()
        pairs = list(zip(self.ys[0::2], self.ys[1::2], strict=False))
        self.ys = [None if None in pair else float(f"{sum(pair) / 2:.5g}") for pair in pairs]  # type: ignore[arg-type]
        self.xs = self.xs[1::2][: len(pairs)]
        self.xs.append(last[0])
        self.ys.append(last[1])

    def until(self, x: float) -> "Curve":
        """The points before ``x``."""
        kept = [(one, y) for one, y in zip(self.xs, self.ys, strict=True) if one < x]
        return Curve([one for one, _ in kept], [y for _, y in kept])


@dataclass
class Histogram:
    """How the samples of one iteration are distributed."""

    iteration: int
    low: float
    high: float
    counts: list[int]
    """Of :data:`BINS` bins of equal width from ``low`` to ``high``."""

    @classmethod
    def of(cls, values: Tensor, iteration: int) -> "Histogram | None":
        """That of (N,) numbers without those that are not finite; ``None``: there are none."""
        finite = values.double()[values.double().isfinite()]
        if not len(finite):
            return None
        low, high = float(finite.min()), float(finite.max())
        if low == high:
            low, high = low - 0.5, high + 0.5
        counts = torch.histc(finite, bins=BINS, min=low, max=high)
        return cls(iteration, low, high, [int(count) for count in counts])

    def rebinned(self, low: float, high: float) -> list[int]:
        """Counts of bins from ``low`` to ``high``, a wider range; each count goes where the middle of its bin is."""
        counts = [0] * BINS
        for position, count in enumerate(self.counts):
            middle = self.low + (self.high - self.low) * (position + 0.5) / BINS
            counts[min(BINS - 1, int((middle - low) / (high - low) * BINS))] += count
        return counts


@dataclass
class RunData:
    """Everything that the page of one run shows."""

    name: str
    axis: str = "iteration"
    """What curves are drawn over: ``iteration`` or ``step``."""
    state: str = "training"
    facts: list[tuple[str, str]] = field(default_factory=list)
    """Lines of the overview: a name and a value."""
    curves: dict[str, Curve] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Of each kept iteration: ``iteration`` and ``groups``, which have a prompt and its samples."""
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    configuration: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Characters of the samples of an iteration, once they have been counted."""

    def add_metrics(self, metrics: Mapping[str, Any], x: float) -> None:
        """Add a point to the curve of each metric."""
        for name, value in metrics.items():
            self.curves.setdefault(name, Curve()).add(x, float(value))

    def add_values(self, name: str, values: Tensor, iteration: int) -> None:
        """Add how (N,) numbers of an iteration's samples are distributed."""
        found = Histogram.of(values, iteration)
        if found is None:
            return
        kept = self.histograms.setdefault(name, [])
        kept.append(found)
        if len(kept) > MOST_POINTS // 2:
            del kept[1:-1:2]

    def add_samples(self, groups: Sequence[dict[str, Any]], iteration: int) -> None:
        """Keep groups of samples of an iteration; earlier ones make room for them."""
        self.samples = [*(one for one in self.samples if one["iteration"] != iteration)]
        self.samples.append({"iteration": iteration, "groups": list(groups)})
        self._sizes.pop(iteration, None)
        for one in self.samples:
            if one["iteration"] not in self._sizes:
                self._sizes[one["iteration"]] = len(json.dumps(one))
        sizes = [self._sizes[one["iteration"]] for one in self.samples]
        while sum(sizes) > SAMPLE_BYTES and len(sizes) > 2:
            del self.samples[1:-1:2], sizes[1:-1:2]

    def until(self, x: float) -> "RunData":
        """What was there before an iteration or step, to continue from it."""
        curves = {name: curve.until(x) for name, curve in self.curves.items()}
        return RunData(
            name=self.name,
            axis=self.axis,
            curves={name: curve for name, curve in curves.items() if curve.xs},
            samples=[one for one in self.samples if one["iteration"] < x],
            histograms={name: [one for one in kept if one.iteration < x] for name, kept in self.histograms.items()},
            alarms=[one for one in self.alarms if one["iteration"] < x],
        )

    def as_json(self) -> dict[str, Any]:
        """What the page reads."""
        return {
            "name": self.name,
            "axis": self.axis,
            "state": self.state,
            "facts": self.facts,
            "series": {name: [curve.xs, curve.ys] for name, curve in sorted(self.curves.items())},
            "samples": self.samples,
            "distributions": {name: _shown(kept) for name, kept in self.histograms.items() if kept},
            "histograms": {name: [asdict(one) for one in kept] for name, kept in self.histograms.items()},
            "alarms": self.alarms,
            "timeline": self.timeline,
            "configuration": self.configuration,
            "versions": self.versions,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunData":
        """The data of a page."""
        return cls(
            name=found["name"],
            axis=found["axis"],
            state=found["state"],
            facts=[(name, value) for name, value in found["facts"]],
            curves={name: Curve(xs, ys) for name, (xs, ys) in found["series"].items()},
            samples=found["samples"],
            histograms={name: [Histogram(**one) for one in kept] for name, kept in found["histograms"].items()},
            alarms=found["alarms"],
            timeline=found["timeline"],
            configuration=found["configuration"],
            versions=found["versions"],
        )


def _shown(kept: Sequence[Histogram]) -> dict[str, Any]:
    """Histograms over one range, as the page draws them."""
    low, high = min(one.low for one in kept), max(one.high for one in kept)
    return {
        "low": low,
        "high": high,
        "iterations": [one.iteration for one in kept],
        "counts": [one.rebinned(low, high) for one in kept],
    }


def write_page(path: Path, runs: Sequence[RunData]) -> Path:
    """Write the page of a run, or of several to compare them; replaced as a whole, so that a reader sees no half."""
    data = json.dumps({"format": FORMAT, "runs": [run.as_json() for run in runs]}, separators=(",", ":"))
    page = _TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data.replace("</", "<\\/"), 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return path


def read_page(path: Path) -> list[RunData]:
    """The runs of a page.

    Raises:
        ValueError: If it is no report.
    """
    text = path.read_text(encoding="utf-8")
    start = text.find(_BEGIN)
    if start < 0:
        raise ValueError(f"{path} is no report of a run: RunReport() writes one")
    found = json.loads(text[start + len(_BEGIN) : text.index(_END, start)])
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} is a report of another version of rlhfkit (format {found.get('format')})")
    return [RunData.from_json(run) for run in found["runs"]]
