"""Weight updates of vLLM by family: names, shapes and buffers arrive, and the engine says what Transformers says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.families import FAMILIES

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "model_families_vllm.json").read_text())
SERVED = [family.name for family in FAMILIES if RECORD.get(family.name, "").startswith("yes")]
FEW = ("Gemma 3", "OLMo 2", "Qwen 3 MoE")
"""Windows; vLLM's general backend for models that it has no own code for; experts."""
TOLERANCE = 5e-5
"""Nats, as in the table; weights that did not arrive show as 0.1 and more."""
LOOSER = {"BLOOM": 2e-3, "Apertus": 1e-2, "MiniCPM 3": 1e-3}
"""vLLM's own kernels differ from Transformers' by that much with weights that it has read from the files itself."""


def results(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    program = Path(__file__).parent / "vllm_families.py"
    command = [sys.executable, str(program), str(folder), *names]
    limit = 60 * len(names) + 600
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=limit)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["family"]: line for line in lines}


def check(found: dict[str, dict[str, Any]], names: list[str]) -> None:
    assert found.keys() == set(names)
    for name, result in found.items():
        assert "error" not in result, result
        assert max(result["score"], result["sampled"]) <= LOOSER.get(name, TOLERANCE), result


@pytest.mark.vllm
def test_weights_of_a_few_families_arrive(tmp_path: Path) -> None:
    check(results(tmp_path, list(FEW)), list(FEW))


@pytest.mark.vllm
@pytest.mark.families
@pytest.mark.timeout(7200)
def test_weights_of_every_family_that_is_served_arrive(tmp_path: Path) -> None:
    check(results(tmp_path, SERVED), SERVED)
