"""The command; see ``python -m benchmarks.gpu_check --help``."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import MODULES, Check, Setting, load_checks
from benchmarks.gpu_check.report import machine_lines, rows, summary, table, write
from benchmarks.gpu_check.runner import Result, Runner


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu", "sim"), help="default: cuda if there is a GPU")
    parser.add_argument("--quick", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks, or beginnings of their names")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for report.md, report.jsonl and logs")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything; default: %(default)g")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help="Python modules with checks; default: ours")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks; returns 1 if a check of correctness failed."""
    options = parse(words)
    checks = list(load_checks(options.modules).values())
    if options.worker:
        checks = [each for each in checks if each.name in options.only]
    elif options.only:
        checks = [each for each in checks if each.name.startswith(tuple(options.only))]
    if not checks:
        print(f"no check begins with {' or '.join(options.only)}; see --list")
        return 2
    if options.list:
        for each in checks:
            needs = [*each.packages, *([f"{each.gpus} GPU{'s' * (each.gpus > 1)}"] if each.gpus else [])]
            print(f"{each.name}{' (needs ' + ', '.join(needs) + ')' if needs else ''}")
        return 0
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device; --device cpu --quick runs the same code")
        return 2
    setting = Setting(device, options.quick)
    if options.worker:
        from benchmarks.gpu_check.worker import work

        work(checks, setting, options.worker)
    folder = options.output or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    return run(checks, setting, folder, options)


def run(checks: Sequence[Check], setting: Setting, folder: Path, options: argparse.Namespace) -> int:
    """Run the checks and write the report."""
    start = time.monotonic()
    machine: dict[str, Any] = {}

    def describe(found: dict[str, Any]) -> None:
        if not machine:
            machine.update(found)
            print("\n".join(machine_lines(found)), flush=True)

    def report(result: Result) -> None:
        for name, verdict, value, bound, what in rows(result):
            limit = f" (at most {bound})" if bound else ""
            print(f"{name}: {verdict or '-'} {value}{limit} {what}", flush=True)

    runner = Runner(setting, folder, report, describe, budget=options.budget, modules=options.modules)
    results = runner.run(checks)
    seconds = time.monotonic() - start
    write(folder, machine, results, seconds)
    print("\n" + table(results) + f"\n\n{summary(results, seconds)}\nreport: {folder / 'report.md'}")
    return int(any(result.passed is False and not result.check.measures for result in results))


if __name__ == "__main__":
    sys.exit(main())
