"""Measured bytes of runs on several ranks, for ``test_measured.py``; only the ranks import it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "estimate.py"


def benchmark() -> ModuleType:
    """``benchmarks/estimate.py`` as a module."""
    name = "benchmark_of_estimates"
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, SCRIPT)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # dataclasses look their module up
        specification.loader.exec_module(module)
    return sys.modules[name]


def measure_all(folder: str, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Measured bytes of each case on this rank."""
    script = benchmark()
    return [script.measured(script.Case(**case), Path(folder) / str(index)) for index, case in enumerate(cases)]
