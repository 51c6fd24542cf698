"""The commands; see ``python -m benchmarks.scale --help``."""

import argparse
import json
import logging
import subprocess
from typing import Any

from benchmarks.scale import parallelism
from benchmarks.scale.calibration import calibrate, errors, workload_of
from benchmarks.scale.measure import measure_log, measure_runs, measure_store, summarize
from benchmarks.scale.page import MEASURED, PAGE, load, page
from benchmarks.scale.rank import run
from benchmarks.scale.sizes import CALIBRATION, CHECKS, COMPARED, DRIVERS_OF_PARTS, LARGE


def save(measured: dict[str, Any]) -> None:
    """Write ``measured.json``."""
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")


def measure() -> None:
    """Run the real code at small size, fit the constants, and check them against other sizes and numbers of ranks."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    runs, checks = measure_runs(CALIBRATION), measure_runs(CHECKS)
    constants = calibrate(runs, DRIVERS_OF_PARTS)
    measured = load() | {"commit": commit, "runs": runs, "checks": checks, "constants": constants}
    measured |= {"compared": vars(COMPARED)}
    save(measured | {"store": measure_store(), "log": measure_log([*runs, *checks])})
    print(json.dumps({"benchmark": "scale", "predicted_over_measured": errors(constants, checks, apart=("engine",))}))


def large() -> None:
    """16,384 samples over 4 ranks; raises AssertionError if a rank needs more memory than it may."""
    size, ranks = LARGE
    found = summarize(size, run(size, ranks))
    work = workload_of(found)
    limits = {"resident": 40 * work.own_tokens + 200 * work.sequences, "peak": 100 * work.own_tokens}
    save(load() | {"large": found})
    print(json.dumps({"benchmark": "scale_large", **{name: [found[name], limit] for name, limit in limits.items()}}))
    for name, limit in limits.items():
        assert found[name] <= limit, f"{name}: a rank needs {found[name]:,} bytes, more than {limit:,.0f}"


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure", help="constants and checks on this machine, about 5 minutes on two cores")
    commands.add_parser("large", help="16,384 samples of 2,048 tokens over 4 ranks, with a bound on memory")
    commands.add_parser("page", help="write docs/scale.md from what was measured")
    commands.add_parser("parallelism", help="write the table of docs/strategy.md, from closed formulas")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.command == "page":
        PAGE.write_text(page(load()), encoding="utf-8")
    elif options.command == "parallelism":
        parallelism.PAGE.write_text(parallelism.page(parallelism.PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        {"measure": measure, "large": large}[options.command]()


if __name__ == "__main__":
    main()
