"""``RolloutDump``: write every sample of a run to disk, to be read or replayed."""

import filecmp
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import Sample
from rlhfkit.rollout.replay import samples_file, save_samples
from rlhfkit.validation import check_integer


class RolloutDump(Callback):
    """Write the samples of each iteration as JSON lines: tokens, text, log-probs, versions, rewards.

    With several ranks each writes the samples that it generated, as ``iteration_000012.rank_0_of_4.jsonl`` and so on.
    They are written before the iteration is trained on. A run that resumes inside an iteration keeps that iteration's
    file; if a resumed run samples an iteration differently, the old file becomes ``iteration_000012.replaced-1.jsonl``.
    :class:`~rlhfkit.rollout.ReplayEngine` replays the samples. With a ``ReplayBuffer`` the file also has the
    samples in whose place others were replayed.

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
        """Write the iteration whose training begins; every rank writes the samples that it generated."""
        rollouts = RolloutCallback.of(trainer)
        iteration = rollouts.iteration
        if batch_idx or iteration % self.every_n_iterations:
            return
        if not rollouts.inside_collected_iteration:
            return  # resumed inside an iteration; its samples were written when it was collected
        own = partial(samples_file, self.folder, rank=trainer.global_rank, world_size=trainer.world_size)
        path = own(iteration)
        if trainer.is_global_zero:
            self._put_aside_others(iteration, trainer.world_size)
        if not path.exists():
            save_samples(path, _generated(rollouts))
        else:
            self._replace(path, rollouts)
        if self.keep is not None:
            for number in self._numbers(path, iteration)[: -self.keep]:
                own(number).unlink(missing_ok=True)

    def _put_aside_others(self, iteration: int, world_size: int) -> None:
        """Rename files of an earlier run with another number of ranks."""
        for path in self.folder.glob(f"iteration_{iteration:06d}*.jsonl"):
            found = _FILE.fullmatch(path.name)
            if found is not None and int(found[3] or 1) != world_size:
                path.rename(_free_name(path))

    @staticmethod
    def _numbers(path: Path, newest: int) -> list[int]:
        """Iterations up to ``newest`` that this rank has written a file of, ascending."""
        part = _FILE.fullmatch(path.name)
        found = [_FILE.fullmatch(other.name) for other in path.parent.iterdir()]
        return sorted(int(one[1]) for one in found if one and part and one[2] == part[2] and int(one[1]) <= newest)

    @staticmethod
    def _replace(path: Path, rollouts: RolloutCallback) -> None:
        """Write samples of an iteration that already has a file; a file with other content is renamed."""
        new = path.with_name(f"{path.stem}.new.jsonl")
        save_samples(new, _generated(rollouts))
        if filecmp.cmp(path, new, shallow=False):
            new.unlink()
            return
        path.rename(_free_name(path))
        new.rename(path)


def _generated(rollouts: RolloutCallback) -> list[Sample]:
    """The samples that this rank trains on, and those in whose place others were replayed."""
    return [*rollouts.samples, *rollouts.replaced]


_FILE = re.compile(r"iteration_(\d{6,})(\.rank_\d+_of_(\d+))?\.jsonl")


def _free_name(path: Path) -> Path:
    """A name for a file that is replaced."""
    number = 1
    while (kept := path.with_name(f"{path.stem}.replaced-{number}.jsonl")).exists():
        number += 1
    return kept
