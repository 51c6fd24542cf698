"""Runs of a model with two weights, which take milliseconds, with saves at every moment; and saves that are killed."""

import math
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from modules.data_runs import trainer
from torch import Tensor

from rlhfkit.checkpoints import ExactResume
from rlhfkit.data.loaders.experience import ExperienceLoader

BATCHES, EPOCHS = 5, 3


def survives(
    save: Callable[[], None], *, operations: float = math.inf, file_bytes: int = resource.RLIM_INFINITY
) -> bool:
    """Whether a save ends in a process that is killed before a later operation on files, or at a byte of a file.

    Args:
        save: What the process does.
        operations: On files, after which the kernel kills it before it begins another.
        file_bytes: Size of a file beyond which the kernel kills it while it writes.
    """
    pid = os.fork()
    if not pid:
        left = operations

        def count(event: str, arguments: Any) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
            sys.addaudithook(count)
            save()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL, -signal.SIGXFSZ), "the save failed"
    return code == 0


class Line(L.LightningModule):
    """Two weights, noise from the generators of torch, NumPy and Python, a step-wise schedule and a buffer.

    Remembers its batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.seen: list[int] = []
        self.stepped = 0
        """Batches seen when the last optimizer step was done."""
        self.epochs_begun = 0

    def on_train_epoch_start(self) -> None:
        self.epochs_begun += 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(int(batch[0]))
        noise = torch.rand(2, dtype=torch.float64)
        noise *= torch.tensor([np.random.rand(), random.random()], dtype=torch.float64)
        return ((self.weights * noise - batch) ** 2).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.stepped = len(self.seen)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Numbered:
    """A batch of an iteration, as ``ExperienceLoader`` keeps it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}


class NumberLoader(ExperienceLoader):
    """Our loader, with these batches in place of experience."""

    restore = staticmethod(lambda state: Numbered(state["number"]))  # type: ignore[assignment]


class Numbers(L.LightningDataModule):
    """Batch ``n`` of epoch ``e`` is number ``100 * e + n``; of our loader for iterations or of a stateful one."""

    def __init__(self, *, ours: bool) -> None:
        super().__init__()
        self.ours = ours

    def collect(self) -> list[Numbered]:
        assert self.trainer is not None
        torch.rand(3)  # as sampling may
        epoch = self.trainer.current_epoch
        return [Numbered(100 * epoch + n) for n in range(BATCHES)]

    def train_dataloader(self) -> Any:
        if self.ours:
            return NumberLoader(self.collect, BATCHES)  # type: ignore[arg-type]
        return Stateful(self)

    def val_dataloader(self) -> Any:
        return [torch.zeros(1)]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return torch.tensor([batch.number], dtype=torch.float64) if isinstance(batch, Numbered) else batch


class Stateful:
    """A loader of somebody else's: it tells its place and cannot be rewound."""

    def __init__(self, data: Numbers) -> None:
        self.data, self.next, self.resumed = data, 0, False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Numbered]:
        first, self.resumed = (self.next if self.resumed else 0), False
        for number in range(first, BATCHES):
            self.next = number + 1
            assert self.data.trainer is not None
            yield Numbered(100 * self.data.trainer.current_epoch + number)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.resumed = state["next"] % BATCHES, True


def saving(moment: str) -> Any:
    """A hook of ``SaveEverywhere``."""

    def save(self: "SaveEverywhere", trainer: Any, pl_module: Any, *_: Any) -> None:
        name = f"{len(self.saved):03d}-{moment}"
        self.saved[name] = pl_module.stepped
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")

    return save


class SaveEverywhere(L.Callback):
    """Saves in every hook, and notes which batches the checkpoint's weights were trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    on_train_epoch_start = saving("epoch_start")
    on_train_batch_start = saving("batch_start")
    on_after_backward = saving("backward")
    on_train_batch_end = saving("batch_end")
    on_validation_end = saving("validation")
    on_train_epoch_end = saving("epoch_end")

    def path(self, moment: str, done: int) -> Path:
        """The first checkpoint of a moment with so many batches behind it."""
        name = next(name for name, batches in self.saved.items() if batches == done and name.endswith(moment))
        return self.folder / f"{name}.ckpt"


def fit(
    folder: Path,
    *,
    ours: bool = True,
    resume: Path | None = None,
    callbacks: list[L.Callback] | None = None,
    exact: bool = True,
    last: bool = False,
    **options: Any,
) -> Line:
    """A run of three epochs of five batches, or the rest of one.

    ``exact=False`` is plain Lightning; ``last=True`` puts ``ExactResume`` behind the other callbacks, as modules do.
    """
    callbacks = [*(callbacks or [])]
    if exact:
        callbacks.insert(len(callbacks) if last else 0, ExactResume())
    module, data = Line(), Numbers(ours=ours)
    arguments = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "limit_val_batches": 0, "callbacks": callbacks}
    run = trainer(folder, **arguments | options)
    L.seed_everything(7 if resume is None else 1234, verbose=False)
    run.fit(module, data, ckpt_path=resume)
    return module
