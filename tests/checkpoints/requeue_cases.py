"""A rank of a Slurm job that is told to end. It prints each step, and rank 0 the weights."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from modules.data_runs import trainer

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit import SFTDataModule, SFTModule


class EndedBySlurm(Callback):
    """Ends the process as Slurm does once the job is queued again, which ``scontrol`` notes in a file.

    Before ``last_step`` it waits until both ranks have been ``told``.
    """

    def __init__(self, queued_again: Path, last_step: int | None, told: Path) -> None:
        self.queued_again, self.last_step, self.told = queued_again, last_step, told

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Print the step; end where the job was queued again."""
        if self.queued_again.exists():
            os._exit(9)
        print("step", trainer.global_step, flush=True)
        while trainer.global_step == self.last_step and not self.told.exists():
            time.sleep(0.01)


def train(folder: Path, model: str, data: str, saved: str, last_step: int | None = None) -> None:
    """Train, from the checkpoint that Lightning finds in ``saved`` if there is one."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["LOCAL_RANK"]
    L.seed_everything(0)
    module = SFTModule(model, lr=1e-3)
    run = trainer(
        Path(saved),
        strategy="rlhf_zero2",
        devices=2,
        max_epochs=None,
        max_steps=30,
        accumulate_grad_batches=2,
        callbacks=[EndedBySlurm(Path(saved) / "queued_again", last_step, folder / "told")],
    )
    run.fit(module, SFTDataModule(data, micro_batch_size=2))
    if run.is_global_zero:
        digest = hashlib.sha256()
        for parameter in module.policy.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
        print("weights", run.global_step, digest.hexdigest(), flush=True)
