"""What a check is: a function that yields figures, with a time limit and a list of what it needs."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")

MODULES = (
    "benchmarks.gpu_check.correctness.losses",
    "benchmarks.gpu_check.correctness.heads",
    "benchmarks.gpu_check.correctness.attention",
    "benchmarks.gpu_check.correctness.liger",
    "benchmarks.gpu_check.correctness.training",
    "benchmarks.gpu_check.correctness.generation",
    "benchmarks.gpu_check.correctness.resume",
    "benchmarks.gpu_check.correctness.deepspeed",
    "benchmarks.gpu_check.correctness.processes.transfer",
    "benchmarks.gpu_check.correctness.processes.ipc",
    "benchmarks.gpu_check.correctness.processes.nccl",
    "benchmarks.gpu_check.correctness.processes.meshes",
    "benchmarks.gpu_check.correctness.suite",
    "benchmarks.gpu_check.measurements.heads",
    "benchmarks.gpu_check.measurements.attention",
    "benchmarks.gpu_check.measurements.training",
    "benchmarks.gpu_check.measurements.spread",
    "benchmarks.gpu_check.measurements.rollouts",
    "benchmarks.gpu_check.correctness.vllm",
)
"""Modules with checks, in the order of running: cheap checks of correctness, measurements, and last what starts
engines, which would use up the budget."""


class SkippedError(Exception):
    """Raised by a check that cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Setting:
    """Where and how large the checks run."""

    device: str
    """``cuda``, ``cpu`` or ``sim``."""
    quick: bool = False
    """Shrink all shapes, so that the whole list takes a minute or two on a CPU."""

    def size(self, full: T, quick: T) -> T:
        """One of two values."""
        return quick if self.quick else full

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device == "cuda"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Figure:
    """One number of a check."""

    case: str
    value: float | str
    bound: float | None = None
    """Largest value that passes; ``None``: a measurement."""
    unit: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the value is within its bound, which NaN and text are not; ``None`` without a bound."""
        if self.bound is None:
            return None
        return isinstance(self.value, int | float) and math.isfinite(self.value) and self.value <= self.bound


@dataclass(frozen=True)
class Check:
    """A function that yields figures, and what it needs."""

    name: str
    run: Callable[[Setting], Iterator[Figure]]
    seconds: float
    """Time limit."""
    packages: tuple[str, ...] = ()
    gpus: int = 0
    """Number of GPUs that it needs; 0: it runs on a CPU too."""
    process: str = ""
    """Checks of one name share a process. Others than ``""`` change theirs, or need a fresh one."""
    simulated: bool = True
    """Whether it runs on the simulated device, which has no compiler, no process groups and no storages."""

    @property
    def measures(self) -> bool:
        """Whether it is a measurement, whose failure does not fail the command."""
        return self.name.startswith("measure/")


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order of running; filled by :func:`load_checks`."""


def check(
    name: str,
    *,
    seconds: float,
    packages: Sequence[str] = (),
    gpus: int = 0,
    process: str = "",
    simulated: bool = True,
) -> Callable[[Callable[[Setting], Iterator[Figure]]], Callable[[Setting], Iterator[Figure]]]:
    """Register a function as a check; the arguments are the fields of :class:`Check`."""

    def register(function: Callable[[Setting], Iterator[Figure]]) -> Callable[[Setting], Iterator[Figure]]:
        CHECKS[name] = Check(name, function, seconds, tuple(packages), gpus, process, simulated)
        return function

    return register


def load_checks(modules: Sequence[str] = MODULES) -> dict[str, Check]:
    """Import modules with checks."""
    for module in modules:
        importlib.import_module(module)
    return CHECKS
