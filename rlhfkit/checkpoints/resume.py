"""``ExactResume``: whatever moment a checkpoint is saved at, the run that resumes it is the run that went on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from rlhfkit.checkpoints.cleanup import remove_leftovers
from rlhfkit.checkpoints.errors import CheckpointError
from rlhfkit.checkpoints.files import install
from rlhfkit.checkpoints.progress import is_batch_on_its_way, rewind, settle, unfinished_batches
from rlhfkit.checkpoints.random_state import random_state, set_random_state

_KEY = "random_state"


@runtime_checkable
class Rewindable(Protocol):
    """A loader that knows its state of some batches ago."""

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """What ``state_dict`` would have returned that many batches ago.

        Args:
            batches: Of the same epoch, at most those of one optimizer step.
        """
        ...


class ExactResume(Callback):
    """Makes checkpoints complete at any moment and resumes them exactly, under every strategy.

    Our modules bring it along (``configure_callbacks``), and so does ``RLHFDeepSpeedStrategy``; there is nothing to do.
    A subclass of them that overrides ``configure_callbacks`` returns ``[*super().configure_callbacks(), ...]``; if it
    does not, the module's ``setup`` adds the callback. With a module that is none of ours under another strategy:
    ``Trainer(callbacks=[ExactResume()])``.

    - A checkpoint that is saved inside an accumulation window holds the loops, loaders and random states of the
      window's beginning, to which its weights and optimizers belong. Resuming trains on the whole window.
    - Counters that Lightning 2.6.6 would leave one behind are put right when they are loaded
      (:mod:`rlhfkit.checkpoints.progress`).
    - ``ModelCheckpoint`` does not save once more what was just loaded.
    - Random states of torch, NumPy and Python are saved and restored, where the number of ranks is the same and the
      strategy saves every rank (those of plain strategies save rank 0).
    - Single files are written and checked by :class:`~rlhfkit.checkpoints.VerifiedCheckpointIO`.
    - What killed processes have left beside checkpoints is removed when training starts.
    """

    def __init__(self) -> None:
        self._steps: int | None = None  # optimizer steps that a whole batch belongs to
        self._at_window: tuple[int, dict[str, Any]] | None = None  # its first batch, and the random state at its start
        self._at_step: list[dict[str, Any]] = []  # states of loaders that cannot be rewound
        self._loaded: Mapping[str, Any] | None = None  # random state to put back when the first batch is there
        self._resumed = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take over the reading and writing of single files, and remove what kills have left."""
        install(trainer.strategy)
        self._steps, self._at_window, self._at_step, self._loaded, self._resumed = None, None, [], None, False
        if stage == "fit" and trainer.is_global_zero:
            savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
            folders = {Path(one.dirpath) for one in savers if one.dirpath and "://" not in str(one.dirpath)}
            if trainer.ckpt_path and "://" not in str(trainer.ckpt_path):
                folders.add(Path(trainer.ckpt_path).parent)
            for folder in folders:
                remove_leftovers(folder)

    # ------------------------------------------------------------------ saving

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the random state; inside an accumulation window, go back to where it began.

        Raises:
            CheckpointError: When training stopped between an optimizer step and the end of its batch, so that no
                position belongs to the weights.
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
        handed_out = batches + is_batch_on_its_way(trainer)
        if not handed_out:
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
                saved[index] = loader.state_dict_before(handed_out)
            elif self._at_step:
                saved[index] = self._at_step[index]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Undo what starting a loader in the middle of an epoch drew, and note the random state of a new window."""
        if self._loaded is not None:
            if batch_idx > 0 or self._loaded["batch_begun"]:
                set_random_state(self._loaded["state"], trainer.strategy.root_device)
            self._loaded = None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._steps = trainer.global_step
            self._at_window = _batches_begun(trainer), random_state(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an optimizer step, note its number, and where loaders stand that cannot be rewound."""
        if not unfinished_batches(trainer):
            self._steps = trainer.global_step
            self._note_loaders(trainer)

    def _note_loaders(self, trainer: L.Trainer) -> None:
        loaders = _stateful_loaders(trainer)
        rewindable = all(isinstance(loader, Rewindable) for loader in loaders)
        self._at_step = [] if rewindable else [loader.state_dict() for loader in loaders]

    # ------------------------------------------------------------------ resuming

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the counters right, and the generators into their saved state.

        Raises:
            CheckpointError: If the checkpoint was saved inside an accumulation window by a run without this callback.
        """
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return
        fit = checkpoint["loops"]["fit_loop"]
        settle(fit)
        self._resumed = True
        saved = checkpoint.get(_KEY)
        if saved is None:
            self._require_whole_windows(trainer, fit["epoch_loop.batch_progress"])
        every_rank = trainer.world_size == 1 or getattr(trainer.strategy, "saves_every_rank", False)
        if saved and every_rank and saved["rank"] == trainer.global_rank and saved["world_size"] == trainer.world_size:
            set_random_state(saved["state"], trainer.strategy.root_device)
            self._loaded = saved

    def _require_whole_windows(self, trainer: Any, progress: Mapping[str, Any]) -> None:
        """Refuse what was saved inside a window by a run without this callback."""
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
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
        """Make Lightning begin the epoch's batches and its saves where the checkpoint stopped."""
        self._note_loaders(trainer)
        if not self._resumed:
            return
        self._resumed = False
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not callback._last_global_step_saved:
                callback._last_global_step_saved = trainer.global_step  # not in its state (Lightning 2.6.6)
        batches = trainer.fit_loop.epoch_loop
        if batches.batch_progress.current.ready == 0:
            # Nothing of this epoch was trained on. A restarting loop (which it always is with max_steps) would take the
            # place before the first batch for one at which validation is due, and count one that did not happen.
            batches.restarting = False


def _batches_begun(trainer: Any) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def _stateful_loaders(trainer: Any) -> list[Any]:
    """The training loaders whose states are in a checkpoint, in its order."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader for loader in loaders if isinstance(loader, _Stateful)]


def attach(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Add the callback to a trainer that has none, after Lightning has set up its callbacks.

    Args:
        trainer: Whose strategy is being set up.
        pl_module: What it trains.
    """
    if any(isinstance(callback, ExactResume) for callback in trainer.callbacks):  # type: ignore[attr-defined]  # set by a connector
        return
    callback = ExactResume()
    trainer.callbacks.append(callback)  # type: ignore[attr-defined]  # set by a connector
    if trainer.state.fn is not None:
        callback.setup(trainer, pl_module, trainer.state.fn.value)
