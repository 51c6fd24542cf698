"""Estimated memory is within 15 % of what real runs allocate, in every part above 5 % of a run's total.

The long version, larger and with more cases, is ``benchmarks/estimate.py``. Covers benchmarks/estimate.py.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from strategies import ranks


def benchmark() -> ModuleType:
    """``benchmarks/estimate.py`` as a module, also in ranks."""
    name, path = "benchmark_of_estimates", Path(__file__).parents[2] / "benchmarks" / "estimate.py"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)  # dataclasses look it up there
    specification.loader.exec_module(module)
    return module


script = benchmark()
SMALL: dict[str, Any] = {"hidden": 192, "layers": 3, "vocabulary": 1024, "length": 128}
TOLERANCE = 0.15
ALONE = {
    "supervised, checkpointing": {"gradient_checkpointing": True},
    "supervised, tiled blocks": {"tiled_mlp": 64},
    "supervised, checkpointing, tiled blocks": {"gradient_checkpointing": True, "tiled_mlp": 64},
    "supervised, dense head": {"fused_head": False, "vocabulary": 8192},
    "supervised, bfloat16": {"precision": "bf16-true"},
    "supervised, SGD": {"optimizer": "sgd"},
    "supervised, Muon": {"optimizer": "muon"},
    "supervised, Adafactor": {"optimizer": "adafactor"},
    "own samples and critic": {"module": "ppo"},
}
TOGETHER = {
    "ZeRO 2": {"stage": 2, "ranks": 2},
    "ZeRO 3, critic, bfloat16": {"stage": 3, "ranks": 2, "module": "ppo", "precision": "bf16-true"},
    "ZeRO 2, half of the tokens by Ulysses": {"stage": 2, "ranks": 2, "sequence": 2, "length": 256},
}


@pytest.mark.parametrize("name", ALONE)
def test_one_process_needs_what_is_estimated(name: str, tmp_path: Path) -> None:
    case = script.Case(**(SMALL | ALONE[name]))
    found = script.measured(case, tmp_path)
    errors = script.errors(script.estimated(case), found)
    assert errors.keys() >= {"weights", "peak"} | ({"optimizer"} if case.optimizer in ("adamw", "muon") else set())
    assert max(map(abs, errors.values())) <= TOLERANCE, errors


def measure_all(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Measured bytes of each case on this rank."""
    return [script.measured(script.Case(**case), folder / str(index)) for index, case in enumerate(cases)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, float]]]:
    """Measured bytes of all cases on each of two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("measured")
    cases = [SMALL | case for case in TOGETHER.values()]
    return ranks.run("costs.test_measured:measure_all", 2, folder, cases=cases)


@pytest.mark.distributed
@pytest.mark.parametrize("name", TOGETHER)
def test_each_of_two_ranks_needs_what_is_estimated(name: str, reports: list[list[dict[str, float]]]) -> None:
    case, index = script.Case(**(SMALL | TOGETHER[name])), list(TOGETHER).index(name)
    parts = reports[0][index]
    found = {part: max(report[index][part] for report in reports) for part in parts}
    errors = script.errors(script.estimated(case), found)
    assert max(map(abs, errors.values())) <= TOLERANCE, errors
