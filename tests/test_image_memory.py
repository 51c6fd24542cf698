"""The memory of a whole run does not grow with the number of pictures it has seen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_memory_run import FEW, ITERATION, MANY, SIDE

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), [("sft", "pixels"), ("grpo", "processed")])
def test_a_run_keeps_no_picture_that_it_has_seen(kind: str, fault: str, tmp_path: Path) -> None:
    """Rows as paths and as bytes; GRPO with an engine in the process, reference, dump and report.

    The bound is three quarters of what the further pictures have as files, the least that could be kept of them.
    """
    command = [sys.executable, str(TESTS / "image_memory_run.py"), str(tmp_path), kind, fault]
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(tmp_path / "cache")}
    environment["MALLOC_ARENA_MAX"] = "1"  # each would keep free memory of its own
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    _, few, many, faulty = map(json.loads, done.stdout.splitlines())
    assert many["batches"] == few["batches"] * MANY / FEW
    bound = (MANY - FEW) * 3 * SIDE**2 * 0.75
    assert many["bytes"] - few["bytes"] < bound < faulty["bytes"] - many["bytes"], done.stdout
    assert max(few["references"], many["references"]) <= ITERATION + 1  # those of one iteration, and the probe's
    assert many["pictures"] == 0
