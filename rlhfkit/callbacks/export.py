"""``HFExport``: the policy as a Hugging Face folder, while training goes on and at its end, from any strategy."""

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from rlhfkit.protocols import SavesPretrained
from rlhfkit.validation import check_integer


class HFExport(L.Callback):
    """Write ``module.save_pretrained`` folders that ``from_pretrained`` and vLLM load.

    Must run inside the fit: sharded weights are gathered from engines that are gone afterwards. All ranks take part,
    rank 0 writes. A folder appears under its name only when it is complete.

    Args:
        folder: Where the final model goes.
        every_n_epochs: Also write ``<folder>-epoch<k>`` after every so many epochs (RL iterations); None: only at the
            end of training.
        adapter: Write the policy's LoRA adapter alone, for peft, instead of merging it into the weights.
        keep: How many of those to keep; the oldest go first. None: all.

    Raises:
        ValueError: When a number is not positive.
        TypeError: At the start of a fit, when the module has no ``save_pretrained``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        adapter: bool = False,
        every_n_epochs: int | None = None,
        keep: int | None = None,
    ) -> None:
        check_integer("every_n_epochs", every_n_epochs, minimum=1, optional=True)
        check_integer("keep", keep, minimum=1, optional=True)
        self.folder = Path(folder)
        self.adapter = adapter
        self.every_n_epochs = every_n_epochs
        self.keep = keep
        self.written: list[Path] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check early that there is something to export."""
        if stage == "fit" and not isinstance(pl_module, SavesPretrained):
            raise TypeError(
                f"HFExport calls save_pretrained(folder) of the LightningModule, which {type(pl_module).__name__} does"
                " not have; rlhfkit's modules do."
            )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write an intermediate folder when it is due."""
        done = trainer.current_epoch + 1
        if self.every_n_epochs is None or done % self.every_n_epochs:
            return
        folder = self.folder.with_name(f"{self.folder.name}-epoch{done}")
        self._write(trainer, pl_module, folder)
        self.written.append(folder)
        while self.keep is not None and len(self.written) > self.keep:
            oldest = self.written.pop(0)
            if trainer.is_global_zero:
                shutil.rmtree(oldest, ignore_errors=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the final folder."""
        self._write(trainer, pl_module, self.folder)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, folder: Path) -> None:
        assert isinstance(module, SavesPretrained)  # checked in setup
        temporary = folder.with_name(folder.name + ".tmp")
        if trainer.is_global_zero:
            shutil.rmtree(temporary, ignore_errors=True)
        module.save_pretrained(temporary, **({"adapter": True} if self.adapter else {}))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        trainer.strategy.barrier()
        rank_zero_info(f"Exported the model to {folder}")
