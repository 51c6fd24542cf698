"""Slurm ends or preempts a job: all ranks save the same optimizer step, and the job is queued again.

Slurm announces the end of a job by a signal, ``#SBATCH --signal=USR1@300``: 300 s before. Lightning 2.6.6 saves from
inside the handler, wherever the rank is; ranks that are in different places then wait for one another without end (one
of four tries with two ranks), or give the checkpoint different names. Here a handler only notes the signal.
"""

import logging
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

logger = logging.getLogger(__name__)


class RequeueSignal:
    """Notes Slurm's signal in place of Lightning, which leaves a signal alone that has a handler when a fit begins."""

    def __init__(self, trainer: L.Trainer) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        self.received = False
        self._signal: signal.Signals | None = None
        if not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue):
            return
        if threading.current_thread() is threading.main_thread():  # others cannot have handlers
            self._signal = environment.requeue_signal or signal.SIGUSR1
            self._before = signal.signal(self._signal, self._note)

    @property
    def watched(self) -> bool:
        """Whether this run is a Slurm job that is queued again; the same on all ranks."""
        return self._signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def save_and_requeue(self, trainer: L.Trainer) -> None:
        """After an optimizer step: if any rank has the signal, save and have Slurm start the job again. A collective.

        The checkpoint is ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, which Lightning resumes by itself; earlier ones
        are removed. Training goes on until Slurm ends the job: if it does not, nothing is lost.
        """
        if not trainer.strategy.reduce_boolean_decision(self.received, all=False):
            return
        self.received = False
        folder = trainer.default_root_dir
        path = trainer.strategy.broadcast(trainer._checkpoint_connector.hpc_save_path(folder))
        trainer.save_checkpoint(path)
        if not trainer.is_global_zero:
            return
        for old in Path(folder).glob("hpc_ckpt_*.ckpt"):
            if old != Path(path):
                trainer.strategy.remove_checkpoint(old)
        job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        command = ["scontrol", "requeue", job if task is None else f"{job}_{task}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "stderr", None) or error
            logger.warning(
                "%s is saved, but `%s` failed (%s): submit the job again yourself", path, " ".join(command), why
            )
        else:
            logger.info("%s is saved at optimizer step %d, and the job is queued again", path, trainer.global_step)

    def restore(self) -> None:
        """Put the handler of before back."""
        if self._signal is not None:
            signal.signal(self._signal, self._before)
            self._signal = None
