"""A Slurm job that is told to end goes on, when it is started again, as if it had never stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules.data_runs import trainer
from rl_runs import RANK
from strategies import ranks
from tiny_models import tiny_model

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit import SFTDataModule, SFTModule

ROWS = [{"prompt": f"{i}+1=", "completion": f" {i + 1}"} for i in range(100)]


class Ended(Exception):
    """What Slurm does to a job that it has queued again."""


class EndedBySlurm(L.Callback):
    """Tells the ranks to end within the eighth step, each in its own micro-batch, and ends them after the ninth."""

    def __init__(self, told: bool) -> None:
        self.told = told
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)
        if self.told and batch_idx == 14 + RANK:
            os.kill(os.getpid(), signal.SIGUSR1)
        if self.told and trainer.global_step == 9:
            raise Ended


def train(model: str, saved: Path, *, told: bool = False) -> tuple[list[int], list[torch.Tensor]]:
    """The steps of a run, from the checkpoint that Lightning finds in ``saved`` if there is one, and its weights."""
    L.seed_everything(0)
    module, watch = SFTModule(model, lr=1e-3), EndedBySlurm(told)
    options = {"max_epochs": None, "max_steps": 12, "accumulate_grad_batches": 2, "callbacks": [watch]}
    run = trainer(saved, strategy="rlhf_zero2", devices=2, **options)
    run.fit(module, SFTDataModule(ROWS, micro_batch_size=2))
    return watch.steps, list(module.policy.parameters())


def on_rank(folder: Path, model: str) -> None:
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(RANK)
    stopped = folder / "stopped"
    with pytest.raises(Ended):
        train(model, stopped, told=True)
    assert [path.name for path in stopped.glob("hpc_ckpt_*")] == ["hpc_ckpt_1.ckpt"]
    assert RANK > 0 or (folder / "queued_again").read_text() == "requeue 4711\n"
    steps, weights = train(model, stopped)
    assert steps == [8, 8, 9, 9, 10, 10, 11, 11]
    assert all(map(torch.equal, weights, train(model, folder / "through")[1]))


@pytest.mark.distributed
def test_a_job_that_slurm_ends_and_starts_again_has_the_weights_of_one_that_ran_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = {"JOB_ID": "4711", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    slurm |= {"NODELIST": "localhost", "STEP_NUM_TASKS": "2"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    scontrol = tmp_path / "bin" / "scontrol"
    monkeypatch.setenv("PATH", f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}")
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "queued_again"}\n')
    scontrol.chmod(0o755)
    ranks.run(on_rank, 2, tmp_path, model=str(tiny_model(tmp_path / "model")))
