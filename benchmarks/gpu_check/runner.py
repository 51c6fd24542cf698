"""Runs checks in processes of their own, with a time limit for each and one for all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Check, Figure, Setting
from benchmarks.gpu_check.packages import missing

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
"""Time for a process to import everything and start CUDA."""


@dataclass
class Result:
    """What came of a check."""

    check: Check
    figures: list[Figure] = field(default_factory=list)
    skipped: str | None = None
    """Why it did not run."""
    error: str | None = None
    seconds: float = 0.0
    done: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether nothing failed and all figures are within their bounds; ``None``: skipped, or a measurement."""
        if self.error is not None:
            return False
        if self.skipped is not None or self.check.measures:
            return None
        return bool(self.figures) and all(figure.passed is not False for figure in self.figures)


class Runner:
    """Runs checks.

    Args:
        setting: Device and sizes.
        folder: For the files of the processes.
        report: Called with each result as soon as it is there.
        machine: Called with the description of the machine by each process.
        budget: Seconds for all checks together.
        modules: Python modules with the checks.
    """

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        report: Callable[[Result], None],
        machine: Callable[[dict[str, Any]], None],
        *,
        budget: float,
        modules: Sequence[str],
    ) -> None:
        self.setting = setting
        self.folder = folder
        self.deadline = time.monotonic() + budget
        self.report = report
        self.modules = modules
        self.machine = machine
        self._processes = 0

    def run(self, checks: Sequence[Check]) -> list[Result]:
        """Run all; returns their results in the order of the checks."""
        results = {each.name: Result(each) for each in checks}
        for result in results.values():
            result.skipped = self._obstacle(result.check)
            if result.skipped is not None:
                self._finish(result)
        left = [each for each in checks if not results[each.name].done]
        while left:
            group = next_group(left, together=self.setting.quick)
            self._run_group(group, results)
            left = [each for each in left if not results[each.name].done]
        return list(results.values())

    def _obstacle(self, each: Check) -> str | None:
        """Why a check cannot run here; ``None``: it can."""
        if self.setting.device == "sim" and not each.simulated:
            return "cannot run on the simulated device"
        absent = missing(each.packages)
        if absent:
            return f"not installed: {', '.join(absent)}"
        if each.gpus and not self.setting.on_gpu:
            return f"needs {each.gpus} GPU{'s' * (each.gpus > 1)}"
        found = torch.cuda.device_count() if each.gpus else 0
        return f"needs {each.gpus} GPUs, here is {found}" if found < each.gpus else None

    def _run_group(self, group: Sequence[Check], results: dict[str, Result]) -> None:
        """Run checks in one process until all are done, or one fails in a way that ends the process."""
        self._processes += 1
        lines, log = self.folder / f"worker{self._processes}.jsonl", self.folder / f"worker{self._processes}.log"
        lines.write_text("")
        process = self._start([each.name for each in group], lines, log)
        reader = _Reader(lines, results, self)
        limit, late = time.monotonic() + START_SECONDS, ""
        try:
            while True:
                ended = process.poll() is not None
                before = reader.current
                reader.read()
                if reader.current is not before and reader.current is not None:
                    limit = time.monotonic() + reader.current.check.seconds
                elif reader.current is not before:
                    limit = time.monotonic() + START_SECONDS
                if ended:
                    break
                if time.monotonic() > min(limit, self.deadline):
                    late = "the budget of the whole command" if time.monotonic() > self.deadline else "its time limit"
                    break
                time.sleep(0.05)
        finally:
            _kill(process)
        self._explain(group, results, reader.current, late, process.returncode, log)

    def _explain(
        self,
        group: Sequence[Check],
        results: dict[str, Result],
        current: Result | None,
        late: str,
        status: int,
        log: Path,
    ) -> None:
        """Give a result to the check that was running when its process ended, and to those that never will."""
        undone = [results[each.name] for each in group if not results[each.name].done]
        if not undone:
            return
        if time.monotonic() > self.deadline:
            for result in undone:
                self._finish(result, error=f"not finished: {late or 'the budget of the whole command'} was used up")
            return
        broken = current if current is not None else undone[0]
        if late:
            self._finish(broken, error=f"took longer than {late}, {broken.check.seconds:g} s")
        elif not broken.done and (current is not None or status != 3):
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            self._finish(broken, error=f"the process ended with status {status}: {last}"[:400])

    def _finish(self, result: Result, error: str | None = None) -> None:
        result.error, result.done = error, True
        self.report(result)

    def _start(self, names: Sequence[str], lines: Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a process, the leader of a group, so that its own children can be ended with it."""
        words = ["--worker", str(lines), "--only", *names, "--device", self.setting.device]
        words += ["--modules", *self.modules]
        command = [sys.executable, "-m", "benchmarks.gpu_check", *words, *(["--quick"] if self.setting.quick else [])]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # What torch takes on an H100 anyway; without it cuBLAS is not deterministic.
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class _Reader:
    """Turns the lines of a process into results."""

    def __init__(self, path: Path, results: dict[str, Result], runner: Runner) -> None:
        self._file = path.open()
        self._rest = ""
        self._results = results
        self._runner = runner
        self.current: Result | None = None
        """The check that is running."""

    def read(self) -> None:
        """Take what was written since the last call."""
        *whole, self._rest = (self._rest + self._file.read()).split("\n")
        for text in whole:
            self._take(json.loads(text))

    def _take(self, line: dict[str, Any]) -> None:
        if "machine" in line:
            self._runner.machine(line["machine"])
        elif "begin" in line:
            self.current = self._results[line["begin"]]
            self.current.figures.clear()
        elif "figure" in line and self.current is not None:
            self.current.figures.append(Figure(**line["figure"]))
        elif "end" in line:
            result = self._results[line["end"]]
            result.seconds = line["seconds"]
            result.skipped, result.error = line.get("skipped"), line.get("error")
            result.done, self.current = True, None
            self._runner.report(result)


def next_group(left: Sequence[Check], *, together: bool) -> list[Check]:
    """The next checks that share a process: those up to the first of another one, or all with ``together``."""
    end = next((place for place, each in enumerate(left) if each.process != left[0].process), len(left))
    return list(left if together else left[:end])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, which are one process group of ours."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
