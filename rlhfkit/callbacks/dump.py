"""``RolloutDump``: every sample of a run on disk, to be read or replayed."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout import RolloutCallback
from rlhfkit.rollout.replay import samples_file, save_samples
from rlhfkit.validation import check_integer


class RolloutDump(Callback):
    """Writes the samples of each iteration as JSON lines: tokens, text, log-probs, versions, rewards.

    :class:`~rlhfkit.rollout.ReplayEngine` gives them back to a run, without generating.

    Args:
        folder: Where; made when missing.
        every_n_iterations: Leave out the others.
        keep: Iterations to keep, the last ones; ``None``: all.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, folder: str | Path, *, every_n_iterations: int = 1, keep: int | None = None) -> None:
        check_integer("every_n_iterations", every_n_iterations, minimum=1)
        check_integer("keep", keep, minimum=1, optional=True)
        self.folder = Path(folder)
        self.every_n_iterations = every_n_iterations
        self.keep = keep
        self._written: list[Path] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        """Write the iteration that has just been trained on; rank 0 has the samples of all ranks."""
        rollouts = next(callback for callback in trainer.callbacks if isinstance(callback, RolloutCallback))
        iteration = rollouts.iteration - 1  # it has moved on with the last batch
        if not trainer.is_global_zero or iteration % self.every_n_iterations:
            return
        path = samples_file(self.folder, iteration)
        save_samples(path, rollouts.samples)
        self._written.append(path)
        while self.keep is not None and len(self._written) > self.keep:
            self._written.pop(0).unlink(missing_ok=True)
