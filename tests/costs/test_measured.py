"""Estimated memory is within 15 % of what real runs allocate, in every part above 5 % of a run's total.

The long version, larger and with more cases, is ``benchmarks/estimate.py``. Covers benchmarks/estimate.py.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from strategies import ranks

script = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "estimate.py")))
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


def measure_all(folder: Path) -> list[dict[str, float]]:
    """Measured bytes of each case on this rank."""
    return [
        script.measured(script.Case(**SMALL | case), folder / str(number))
        for number, case in enumerate(TOGETHER.values())
    ]


@pytest.mark.distributed
def test_each_of_two_ranks_needs_what_is_estimated(tmp_path: Path) -> None:
    for name, *reports in zip(TOGETHER, *ranks.run("costs.test_measured:measure_all", 2, tmp_path), strict=True):
        found = {part: max(report[part] for report in reports) for part in reports[0]}
        errors = script.errors(script.estimated(script.Case(**SMALL | TOGETHER[name])), found)
        assert max(map(abs, errors.values())) <= TOLERANCE, (name, errors)
