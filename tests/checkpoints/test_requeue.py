"""A Slurm job that is told to end goes on, when it is started again, as if it had never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import tiny_model

SCRIPT = Path(__file__).with_name("requeue_cases.py")
LIMIT = 180.0
"""Seconds for two ranks to start and to train."""


def job(folder: Path, arguments: list[str], step: int | None = None) -> str:
    """What rank 0 of a job of two tasks prints; after optimizer step ``step``, both get the signal of its end."""
    slurm = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    slurm |= {"NODELIST": "localhost", "STEP_NUM_TASKS": "2"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    outputs = [folder.parent / f"rank_{rank}.txt" for rank in range(2)]
    ranks = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), *arguments, str(folder)],
                    env=environment | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                    cwd=folder.parent,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + LIMIT
    try:
        if step is not None:
            while f"step {step}\n" not in outputs[0].read_text():
                assert time.monotonic() < end, outputs[0].read_text()
                assert all(rank.poll() is None for rank in ranks), outputs[0].read_text()
                time.sleep(0.02)
            for rank in ranks:
                rank.send_signal(signal.SIGUSR1)
        for rank in ranks:
            rank.wait(max(end - time.monotonic(), 1))
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    return outputs[0].read_text()


@pytest.mark.distributed
def test_a_job_that_slurm_ends_and_starts_again_has_the_weights_of_one_that_ran_through(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "completion": f" {i + 1}"} for i in range(400)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(tiny_model(tmp_path / "model")), str(tmp_path / "data.jsonl")]
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    stopped, through = tmp_path / "stopped", tmp_path / "through"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {stopped / "queued_again"}\n')
    scontrol.chmod(0o755)

    first = job(stopped, arguments, step=7)
    assert "weights 30" not in first  # it was ended
    assert (stopped / "queued_again").read_text() == "requeue 4711\n"
    assert [path.name for path in stopped.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    (stopped / "queued_again").unlink()
    again = job(stopped, arguments)
    begun = int(again.split("step ", 1)[1].split()[0])
    assert begun >= 7

    last = [line for line in again.splitlines() if line.startswith("weights 30 ")]
    assert len(last) == 1, again
    assert last == [line for line in job(through, arguments).splitlines() if line.startswith("weights 30 ")]
