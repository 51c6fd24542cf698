"""``SampleTable`` prints samples and gives them to loggers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rl_runs import fit_run

from rlhfkit import SampleTable

LOGGERS = ["tensorboard", "wandb", "mlflow"]
APART = Path(sys.prefix) / "loggers"
"""Their packages (``requirements/loggers.txt``), as ``make test-all`` installs them."""


@pytest.mark.long
def test_loggers_get_the_table_and_the_metrics(tmp_path: Path) -> None:
    """Each with its own library, without a network."""
    if not (APART / ".installed").exists() and not all(map(find_spec, LOGGERS)):
        pytest.skip(f"{', '.join(LOGGERS)} are not installed: make test-all has them in {APART}")
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(Path(__file__).with_name("logger_runs.py")), str(tmp_path), *LOGGERS]
    found = os.pathsep.join([str(tests.parent), str(tests), str(APART), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": found}, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for metrics, columns, rows in map(json.loads, done.stdout.splitlines()):
        assert {"rollout/reward", "time/generate", "perf/trained_tokens_per_s", "perf/hours_left"} <= {*metrics}
        assert columns == ["iteration", "prompt", "completion", "digits", "reward", "advantage"][-len(columns) :]
        assert rows >= 4
    assert done.stdout.count("\n") == len(LOGGERS)


def test_the_table_is_printed_every_so_many_iterations_with_prompts_and_parts_of_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, rollouts = fit_run(tmp_path, callbacks=[SampleTable(every_n_iterations=2)], max_epochs=3)
    printed = capsys.readouterr().out
    assert "iteration 0" in printed
    assert "iteration 1" not in printed
    assert "iteration 2" in printed
    columns, rows = SampleTable(rows=4).table(rollouts)
    assert columns == ["prompt", "completion", "digits", "reward", "advantage"]
    assert all(heading in printed for heading in columns)
    best = max(rollouts.samples, key=lambda sample: sample.reward or 0.0)
    assert len(rows) == 4
    assert rows[0][0] == best.prompt.text
    assert rows[0][3] == best.reward
