"""``RolloutDump``: every sample of a run on disk, to be read or replayed."""

import filecmp
import re
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.rollout.replay import samples_file, save_samples
from rlhfkit.validation import check_integer


class RolloutDump(Callback):
    """Writes the samples of each iteration as JSON lines: tokens, text, log-probs, versions, rewards.

    They are written before the iteration is trained on, so that those of an iteration in which the run dies are there.
    Nothing that is there is lost: a run that is resumed inside an iteration leaves the file of that iteration as it is,
    and other samples for an iteration that has a file already take its name, while the older file becomes
    ``iteration_000012.replaced-1.jsonl``.

    :class:`~rlhfkit.rollout.ReplayEngine` gives them back to a run, without generating.

    Args:
        folder: Where; made when missing.
        every_n_iterations: Leave out the others.
        keep: Iterations to keep, the last ones, those of the run that was resumed among them; ``None``: all.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, folder: str | Path, *, every_n_iterations: int = 1, keep: int | None = None) -> None:
        check_integer("every_n_iterations", every_n_iterations, minimum=1)
        check_integer("keep", keep, minimum=1, optional=True)
        self.folder = Path(folder)
        self.every_n_iterations = every_n_iterations
        self.keep = keep

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Write the iteration whose training begins; rank 0 has the samples of all ranks."""
        rollouts = RolloutCallback.of(trainer)
        iteration = rollouts.iteration
        if batch_idx or not trainer.is_global_zero or iteration % self.every_n_iterations:
            return
        if not rollouts.samples:
            return  # a checkpoint brought the rest of an iteration; its samples were written when they were made
        path = samples_file(self.folder, iteration)
        if not path.exists():
            save_samples(path, rollouts.samples)
        else:
            self._replace(path, rollouts)
        if self.keep is not None:
            numbers = sorted(number for number in _iterations(self.folder) if number <= iteration)
            for number in numbers[: -self.keep]:
                samples_file(self.folder, number).unlink(missing_ok=True)

    @staticmethod
    def _replace(path: Path, rollouts: RolloutCallback) -> None:
        """Write the samples of an iteration that was written before, by the run that this one goes on with."""
        new = path.with_name(f"{path.stem}.new.jsonl")
        save_samples(new, rollouts.samples)
        if filecmp.cmp(path, new, shallow=False):
            new.unlink()
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}.replaced-{number}.jsonl")).exists():
            number += 1
        path.rename(kept)
        new.rename(path)


def _iterations(folder: Path) -> list[int]:
    """Iterations that have a file."""
    found = (re.fullmatch(r"iteration_(\d{6,})\.jsonl", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match]
