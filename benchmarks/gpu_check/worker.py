"""A process that runs checks one after the other and writes what they say to a file, line by line."""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Check, Setting, SkippedError
from benchmarks.gpu_check.packages import describe, is_installed

CLEAN, BROKEN = 0, 3
"""Exit statuses: all checks ran; the device gives nothing but errors after one of them."""


class Lines:
    """A file of JSON lines that another process reads meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, **line: Any) -> None:
        """Write a line at once."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def work(checks: Sequence[Check], setting: Setting, path: Path) -> None:
    """Run the checks and exit; a check that raises does not stop the others unless the device is unusable."""
    if setting.device == "sim":
        register_simulated_device()
    lines = Lines(path)
    lines.write(machine=describe(setting.device))
    if not setting.on_gpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    for each in checks:
        lines.write(begin=each.name)
        start = time.perf_counter()
        outcome: dict[str, Any] = {}
        try:
            _reset(setting)
            for figure in each.run(setting):
                lines.write(figure=asdict(figure))
        except SkippedError as reason:
            outcome["skipped"] = str(reason)
        except Exception as error:  # whatever a check raises is its result
            absent = missing_package(error)
            if absent is not None:
                outcome["skipped"] = f"not installed: {absent}"
                lines.write(end=each.name, seconds=round(time.perf_counter() - start, 2), **outcome)
                continue
            traceback.print_exc()
            text = next(iter(str(error).strip().splitlines()), "")
            outcome["error"] = f"{type(error).__name__}: {text}"[:400]
        lines.write(end=each.name, seconds=round(time.perf_counter() - start, 2), **outcome)
        if "error" in outcome and not _usable(setting):
            _exit(BROKEN)
    _exit(CLEAN)


def missing_package(error: BaseException) -> str | None:
    """The package for the lack of which a check failed; ``None`` if that was not the reason."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, ModuleNotFoundError) and reason.name:
            package = reason.name.partition(".")[0]
            return None if is_installed(package) else package
        reason = reason.__cause__
    return None


def register_simulated_device() -> None:
    """Add the device ``sim`` of the tests: the CPU's numbers and the errors of a GPU where devices mix."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from simulated_device import register

    register()


def _exit(status: int) -> None:
    """End at once: libraries that wait for threads or devices at exit must not keep the next process waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _reset(setting: Setting) -> None:
    """Undo what the check before may have left."""
    gc.collect()
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    if setting.on_gpu:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision("highest")  # no TF32
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _usable(setting: Setting) -> bool:
    """Whether the device still computes: after an illegal access every call fails."""
    if not setting.on_gpu:
        return True
    try:
        return float(torch.ones(2, device="cuda").sum()) == 2
    except Exception:
        return False
