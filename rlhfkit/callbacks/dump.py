"""``RolloutDump``: write every sample of a run to disk, to be read or replayed."""

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
    """Write the samples of each iteration as JSON lines: tokens, text, log-probs, versions, rewards.

    They are written before the iteration is trained on. A run that resumes inside an iteration keeps that iteration's
    file; if a resumed run samples an iteration differently, the old file becomes ``iteration_000012.replaced-1.jsonl``.
    :class:`~rlhfkit.rollout.ReplayEngine` replays the samples.

    Args:
        folder: Created when missing.
        every_n_iterations: Write iterations 0, n, 2n ...
        keep: Number of latest iterations to keep, counted over resumed runs; ``None``: all.

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
        """Write the iteration whose training begins; rank 0 writes the samples of all ranks."""
        rollouts = RolloutCallback.of(trainer)
        iteration = rollouts.iteration
        if batch_idx or not trainer.is_global_zero or iteration % self.every_n_iterations:
            return
        if not rollouts.samples:
            return  # resumed inside an iteration; its samples were written when it was collected
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
        """Write samples of an iteration that already has a file; a file with other content is renamed."""
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
    """Numbers of the iterations that have a file."""
    found = (re.fullmatch(r"iteration_(\d{6,})\.jsonl", path.name) for path in folder.iterdir())
    return [int(match[1]) for match in found if match]
