"""Constants of the simulator from measured runs: least squares with constants of at least 0."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from benchmarks.scale.simulator import BYTES, DRIVERS, Workload, predict


def workload_of(run: Mapping[str, Any]) -> Workload:
    """The workload of a measured run."""
    size = run["size"]
    return Workload(
        sequences=size["prompts"] * size["group_size"],
        group_size=size["group_size"],
        prompt_tokens=size["prompt_tokens"],
        answer_tokens=run.get("answer_tokens", size["tokens"]),
        longest=run.get("longest", size["prompt_tokens"] + size["tokens"]),
        ranks=run["ranks"],
        micro_batch_size=size["micro_batch_size"],
    )


def fit(works: Sequence[Workload], measured: Sequence[float], drivers: Sequence[str]) -> dict[str, float]:
    """Constants of one part, at least 0, that make the sum of squared **relative** errors smallest.

    All subsets of the drivers are tried; with at most four there are few.
    """
    scale = [max(value, 1e-9) for value in measured]
    best: tuple[float, dict[str, float]] = (float("inf"), dict.fromkeys(drivers, 0.0))
    for count in range(1, len(drivers) + 1):
        for chosen in itertools.combinations(drivers, count):
            columns = [[DRIVERS[name](work) / top for name in chosen] for work, top in zip(works, scale, strict=True)]
            wanted = [value / top for value, top in zip(measured, scale, strict=True)]
            found, *_ = numpy.linalg.lstsq(numpy.array(columns), numpy.array(wanted), rcond=None)
            if (found < 0).any():
                continue
            error = float(((numpy.array(columns) @ found - numpy.array(wanted)) ** 2).sum())
            if error < best[0] - 1e-12:
                best = error, dict.fromkeys(drivers, 0.0) | dict(zip(chosen, map(float, found), strict=True))
    return best[1]


def calibrate(runs: Sequence[Mapping[str, Any]], drivers: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Constants of every part, by driver, from measured runs; a part that a run does not have took 0 s in it."""
    works = [workload_of(run) for run in runs]
    found = {}
    for part, names in drivers.items():
        if part in BYTES:
            measured = [float(run[part]) for run in runs]
        else:
            measured = [run["parts"].get(part, {"mean": 0.0})["mean"] for run in runs]
        present = [(work, value) for work, value in zip(works, measured, strict=True) if value > 0]
        if present:
            found[part] = fit([work for work, _ in present], [value for _, value in present], names)
    return found


def errors(
    constants: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]], *, apart: Sequence[str] = ()
) -> list[dict[str, float]]:
    """Predicted over measured seconds and bytes of each run; parts ``apart`` (the fake engine) are left out of both."""
    ratios = []
    for run in runs:
        found = predict(constants, workload_of(run))
        measured = sum(part["mean"] for name, part in run["parts"].items() if name not in apart)
        predicted = sum(seconds for name, seconds in found.seconds.items() if name not in apart)
        ratios.append({"ranks": run["ranks"], "seconds": predicted / measured})
        ratios[-1] |= {name: getattr(found, name) / run[name] for name in BYTES if run[name]}
    return ratios
