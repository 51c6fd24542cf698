"""The demo at reduced size: the command that ``make demo`` runs, as a process of its own, in another folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfkit.callbacks.report.page import read_page

ROOT = Path(__file__).parent.parent


@pytest.mark.smoke
@pytest.mark.slow
def test_the_demo_learns_and_writes_its_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhfkit", "demo", "--folder", tmp_path, "--iterations", "20"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (float(x) for x in re.findall(r"held-out accuracy \w+ GRPO: +([\d.]+)%", done.stdout))
    assert after >= before + 5, done.stdout[-1500:]
    report = Path(re.findall(r"open (\S+)", done.stdout)[0])
    [run] = read_page(report)
    assert run.state == "finished"
    assert run.curves["rollout/reward"].xs[-1] == 19
    assert (tmp_path / "grpo_model" / "model.safetensors").is_file()
    assert (report.parent / "metrics.csv").read_text().count("\n") > 20
    assert len(re.findall(r"^iteration +20 of 20: ", done.stdout, re.MULTILINE)) == 1
    assert done.stdout.rstrip().splitlines()[-1].strip().startswith("rlhfkit init grpo")
