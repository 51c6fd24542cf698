"""``ExactResume``: a run resumed from any checkpoint continues exactly as the run that saved it."""

import logging
import os
import random
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from rlhfkit.checkpoints.files import CheckpointError, install_verified_io, remove_abandoned
from rlhfkit.protocols import RLHFStrategy
from rlhfkit.trainer_parts import callbacks_of

logger = logging.getLogger(__name__)

_KEY = "random_state"


@runtime_checkable
class Rewindable(Protocol):
    """A loader that can return its earlier states."""

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """Return the state before the last ``batches``, all of the same epoch and optimizer step."""
        ...


class ExactResume(Callback):
    """Makes checkpoints complete at any moment and resumes them exactly, under every strategy.

    The modules of rlhfkit (in ``configure_callbacks``, else in ``setup``) and ``RLHFDeepSpeedStrategy`` add it to the
    Trainer. With another module under another strategy: ``Trainer(callbacks=[ExactResume()])``.

    - A checkpoint saved inside an accumulation window has the loops, loaders and random states of the window's
      beginning, to which its weights and optimizers belong. Resuming trains on the whole window.
    - Counters that Lightning 2.6.6 would leave one too low are corrected when they are loaded
      (:mod:`rlhfkit.checkpoints.resume`).
    - ``ModelCheckpoint`` does not immediately save again what was just loaded.
    - Random states of torch, NumPy and Python are saved, and restored if the number of ranks is the same and the
      strategy saves those of every rank (Lightning's own strategies save rank 0).
    - Single files are written and verified by :class:`~rlhfkit.checkpoints.VerifiedCheckpointIO`.
    - Unfinished checkpoints of killed processes are removed when training starts.
    - When Slurm announces the end of a job (``#SBATCH --signal=USR1@300``), all ranks save after the same optimizer
      step, and the job is queued again (:class:`RequeueSignal`).
    """

    def __init__(self) -> None:
        self._steps: int | None = None  # global_step at the last boundary of a window
        self._at_window: tuple[int, dict[str, Any]] | None = None  # number of its first batch, random state before it
        self._at_step: list[dict[str, Any]] = []  # states of loaders that are not Rewindable, at the last boundary
        self._loaded: Mapping[str, Any] | None = None  # to be restored again before the first batch
        self._resumed = False
        self._requeue: RequeueSignal | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Install :class:`VerifiedCheckpointIO`, and remove unfinished checkpoints of killed processes."""
        install_verified_io(trainer.strategy)
        self._steps, self._at_window, self._at_step, self._loaded, self._resumed = None, None, [], None, False
        if stage == "fit":
            self._requeue = RequeueSignal(trainer)
        if stage == "fit" and trainer.is_global_zero:
            savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
            folders = {Path(one.dirpath) for one in savers if one.dirpath and "://" not in str(one.dirpath)}
            if trainer.ckpt_path and "://" not in str(trainer.ckpt_path):
                folders.add(Path(trainer.ckpt_path).parent)
            for folder in folders:
                remove_abandoned(folder)

    # ------------------------------------------------------------------ saving

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the random state; inside an accumulation window, rewind to its beginning.

        Raises CheckpointError if training stopped between an optimizer step and the end of its batch.
        """
        device = trainer.strategy.root_device
        checkpoint[_KEY] = {
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "batch_begun": False,
            "state": random_state(device),
        }
        if trainer.state.fn != TrainerFn.FITTING:
            return
        batches = unfinished_batches(trainer)
        fetched = batches + has_uncounted_batch(trainer)
        if not fetched:
            return
        if self._steps not in (None, trainer.global_step):
            raise CheckpointError(
                f"Training stopped between optimizer step {trainer.global_step} and the end of its micro-batch: a "
                "checkpoint of this moment could not be resumed exactly, so none is saved. Resume the last one."
            )
        checkpoint[_KEY]["batch_begun"] = True
        if self._at_window is not None and self._at_window[0] == _batches_begun(trainer) - batches + 1:
            checkpoint[_KEY]["state"] = self._at_window[1]
        fit = checkpoint["loops"]["fit_loop"]
        rewind(fit, batches)
        saved = fit["state_dict"].get("combined_loader") or []
        for index, loader in enumerate(_stateful_loaders(trainer) if saved else []):
            if isinstance(loader, Rewindable):
                saved[index] = loader.state_dict_before(fetched)
            elif self._at_step:
                saved[index] = self._at_step[index]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Restore the random state that starting the loader has changed; record it at the start of a window."""
        if self._loaded is not None:
            if batch_idx > 0 or self._loaded["batch_begun"]:
                set_random_state(self._loaded["state"], trainer.strategy.root_device)
            self._loaded = None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._steps = trainer.global_step
            self._at_window = _batches_begun(trainer), random_state(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an optimizer step, record its number and the states of loaders that are not rewindable."""
        if not unfinished_batches(trainer):
            self._steps = trainer.global_step
            self._note_loaders(trainer)
            if self._requeue is not None and self._requeue.watched:
                self._requeue.save_and_requeue(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the signal to whoever had it before."""
        if self._requeue is not None:
            self._requeue.restore()
            self._requeue = None

    def _note_loaders(self, trainer: L.Trainer) -> None:
        loaders = _stateful_loaders(trainer)
        rewindable = all(isinstance(loader, Rewindable) for loader in loaders)
        self._at_step = [] if rewindable else [loader.state_dict() for loader in loaders]

    # ------------------------------------------------------------------ resuming

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Correct the counters and restore the random state.

        Raises CheckpointError if a run without this callback saved the checkpoint inside an accumulation window.
        """
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        fit = checkpoint["loops"]["fit_loop"]
        normalize_counters(fit)
        self._resumed = True
        saved = checkpoint.get(_KEY)
        if saved is None:
            self._require_whole_windows(trainer, fit["epoch_loop.batch_progress"])
        strategy = trainer.strategy
        every_rank = trainer.world_size == 1 or (isinstance(strategy, RLHFStrategy) and strategy.saves_every_rank)
        if saved and every_rank and saved["rank"] == trainer.global_rank and saved["world_size"] == trainer.world_size:
            set_random_state(saved["state"], trainer.strategy.root_device)
            self._loaded = saved

    def _require_whole_windows(self, trainer: L.Trainer, progress: Mapping[str, Any]) -> None:
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks_of(trainer)):
            return
        batch, window = progress["current"], trainer.accumulate_grad_batches
        if batch["ready"] == batch["processed"] and (batch["ready"] % window == 0 or progress["is_last_batch"]):
            return
        raise CheckpointError(
            f"The checkpoint was saved after {batch['processed']} micro-batches of an epoch, and this run makes an "
            f"optimizer step every {window} (accumulate_grad_batches): the gradients of a window that was begun are in "
            "no checkpoint. Resume with the accumulate_grad_batches of the run that saved it, or from a checkpoint of "
            "an optimizer step."
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make loaders, the epoch loop and ``ModelCheckpoint`` continue where the checkpoint was saved."""
        self._note_loaders(trainer)
        if not self._resumed:
            return
        self._resumed = False
        loop = trainer.fit_loop
        if loop.restarting and loop._combined_loader_states_to_load and loop._data_fetcher is not None:
            # Loaders were made before their states were read: a learning rate that decays asks for their length.
            loop._load_combined_loader_states()
            iter(loop._data_fetcher)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not callback._last_global_step_saved:
                callback._last_global_step_saved = trainer.global_step  # not in its state (Lightning 2.6.6)
        batches = trainer.fit_loop.epoch_loop
        if batches.batch_progress.current.ready == 0:
            # No batch of this epoch was trained on. A restarting loop (with max_steps it always is) would treat this
            # as a point at which validation is due, and count a validation that did not happen.
            batches.restarting = False


def _batches_begun(trainer: L.Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def _stateful_loaders(trainer: L.Trainer) -> list[_Stateful[Any]]:
    """Return the training loaders whose states are in a checkpoint, in its order."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader for loader in loaders if isinstance(loader, _Stateful)]


def attach_exact_resume(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Add :class:`ExactResume` to a Trainer without it, after Lightning has set up the callbacks."""
    callbacks = callbacks_of(trainer)
    if any(isinstance(callback, ExactResume) for callback in callbacks):
        return
    callback = ExactResume()
    callbacks.append(callback)
    if trainer.state.fn is not None:
        callback.setup(trainer, pl_module, trainer.state.fn.value)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random states of torch, NumPy and Python as plain types, which load without running code."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a state that :func:`random_state` returned."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def unfinished_batches(trainer: L.Trainer) -> int:
    """Return the number of batches fetched in the open accumulation window."""
    loop = trainer.fit_loop
    batch: Any = loop.epoch_loop.batch_progress.current  # Lightning types it without "processed"
    if batch.ready == batch.processed and not loop._should_accumulate():
        return 0
    window = trainer.accumulate_grad_batches
    return int(batch.ready - batch.processed // window * window)


def has_uncounted_batch(trainer: L.Trainer) -> bool:
    """Whether a loader has returned a batch that the loops do not count yet because it is being moved to the device."""
    fetcher = trainer.fit_loop._data_fetcher
    # Fetchers without a length are always one batch ahead.
    counted = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return fetcher is not None and fetcher.length is not None and fetcher.fetched == counted + 1


# ---------------------------------------------------------------- counters
#
# Lightning counts four events of each epoch and batch: ready, started, processed, completed. ``on_train_batch_end``,
# where ``ModelCheckpoint(every_n_train_steps=...)`` saves, comes after "processed" and before "completed".
#
# Lightning 2.6.6 resumes wrongly from a checkpoint of the last batch of an epoch. ``_FitLoop.reset`` counts the epoch
# as processed and completed, but ``on_advance_start`` still treats the run as stopped inside an epoch, so it neither
# counts the next epoch as ready nor calls ``on_train_epoch_start``. From then on "ready" is one too low; a checkpoint
# saved inside that epoch looks like one of the end of an epoch, and resuming it trains the epoch once more. The code
# came with https://github.com/Lightning-AI/pytorch-lightning/pull/20379 (2.5.0); 2.5.6 and 2.6.0 do the same. We have
# found no report of it as of November 2026. The nearest is
# https://github.com/Lightning-AI/pytorch-lightning/issues/19617 (``max_steps`` at the end of an epoch), which
# :func:`normalize_counters` also corrects.

Counters = dict[str, Any]
"""``checkpoint["loops"]["fit_loop"]``."""


def normalize_counters(fit: Counters) -> None:
    """Correct the counters of a checkpoint, in place, so that Lightning resumes exactly.

    After the last batch of an epoch, the epoch is counted as completed and the next one as not begun; inside an epoch,
    a "ready" that is one too low is corrected.
    """
    epochs, batches = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    epoch, batch = epochs["current"], batches["current"]
    after_batch = batch["completed"] < batch["processed"] == batch["ready"]  # saved in on_train_batch_end
    last = batches["is_last_batch"]
    if epoch["processed"] == epoch["ready"] and batch["ready"] > 0 and (after_batch or not last):
        for counts in epochs.values():
            counts["ready"] += 1
            counts["started"] = counts["ready"]
    if after_batch and last:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # counted after the hook
        _complete_epochs(fit, epoch["ready"])
    elif epoch["started"] == epoch["processed"]:  # an epoch's end, or the hook at the next one's start
        _complete_epochs(fit, epoch["processed"])


def _complete_epochs(fit: Counters, epochs: int) -> None:
    """Count ``epochs`` epochs as completed, and no batch of the next one as begun."""
    for counts in fit["epoch_progress"].values():
        counts.update(dict.fromkeys(counts, epochs))
    batches = fit["epoch_loop.batch_progress"]
    batches["total"].update(dict.fromkeys(batches["total"], batches["total"]["ready"]))
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    batches["is_last_batch"] = False


def rewind(fit: Counters, batches: int) -> None:
    """Uncount the last ``batches`` of the epoch, in place, as if they had not been fetched."""
    progress = fit["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["ready"] - batches))
    progress["is_last_batch"] = False


class RequeueSignal:
    """Notes Slurm's signal in place of Lightning, which leaves a signal alone that has a handler when a fit begins.

    Slurm announces the end of a job by a signal, ``#SBATCH --signal=USR1@300``: 300 s before. Lightning 2.6.6 saves
    from inside the handler, wherever the rank is; ranks that are in different places then wait for one another without
    end (one of four tries with two ranks), or give the checkpoint different names. Here a handler only notes the
    signal.
    """

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
