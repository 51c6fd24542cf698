"""A Slurm job that is told to end goes on, when it is started again, as if it had never stopped."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from strategies import ranks
from tiny_models import tiny_model

LIMIT = 600.0
"""Seconds for two ranks to start and to train."""


def job(saved: Path, step: int | None = None, **arguments: Any) -> str:
    """What rank 0 of a job of two tasks prints; before optimizer step ``step``, both get the signal of its end."""
    folder, end = saved.parent / "ranks", time.monotonic() + LIMIT
    processes = ranks.start("checkpoints.requeue_cases:train", 2, folder, saved=str(saved), last_step=step, **arguments)
    try:
        for rank, process in enumerate(processes if step is not None else []):
            while f"step {step}\n" not in (printed := (folder / f"rank_{rank}.log").read_text()):
                assert time.monotonic() < end, printed
                assert process.poll() is None, printed
                time.sleep(0.02)
        for process in processes if step is not None else []:
            os.kill(process.pid, signal.SIGUSR1)
        (folder / "told").touch()
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        ranks.stop(processes)
    return (folder / "rank_0.log").read_text()


@pytest.mark.distributed
def test_a_job_that_slurm_ends_and_starts_again_has_the_weights_of_one_that_ran_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    slurm |= {"NODELIST": "localhost", "STEP_NUM_TASKS": "2"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    rows = [{"prompt": f"{i}+1=", "completion": f" {i + 1}"} for i in range(400)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"model": str(tiny_model(tmp_path / "model")), "data": str(tmp_path / "data.jsonl")}
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    stopped, through = tmp_path / "stopped", tmp_path / "through"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {stopped / "queued_again"}\n')
    scontrol.chmod(0o755)

    first = job(stopped, step=7, **arguments)
    assert "weights 30" not in first  # it was ended
    assert (stopped / "queued_again").read_text() == "requeue 4711\n"
    assert [path.name for path in stopped.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    (stopped / "queued_again").unlink()
    again = job(stopped, **arguments)
    begun = int(again.split("step ", 1)[1].split()[0])
    assert begun >= 7

    last = [line for line in again.splitlines() if line.startswith("weights 30 ")]
    assert len(last) == 1, again
    assert last == [line for line in job(through, **arguments).splitlines() if line.startswith("weights 30 ")]
