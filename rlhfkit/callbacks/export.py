"""``HFExport``: save the policy as a Hugging Face folder during and after training, under any strategy."""

import os
import shutil
from pathlib import Path

import lightning as L
from lightning_utilities.core.rank_zero import rank_zero_info

from rlhfkit.protocols import SavesPretrained
from rlhfkit.validation import check_integer


class HFExport(L.Callback):
    """Write folders with ``module.save_pretrained`` that ``from_pretrained`` and vLLM load.

    It runs inside the fit, while the engines that gather sharded weights exist. All ranks take part, rank 0 writes. A
    folder is renamed to its final name when it is complete.

    Args:
        folder: Folder of the final model.
        adapter: Write only the policy's LoRA adapter, for peft, instead of merging it into the weights.
        every_n_epochs: Also write ``<folder>-epoch<k>`` every n epochs (RL iterations); ``None``: only the final model.
        keep: Number of latest ``-epoch<k>`` folders to keep; ``None``: all.

    Raises:
        ValueError: If a number is below 1.
        TypeError: At the start of a fit, if the module has no ``save_pretrained``.
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
        """Check that the module can be exported."""
        if stage == "fit" and not isinstance(pl_module, SavesPretrained):
            raise TypeError(
                f"HFExport calls save_pretrained(folder) of the LightningModule, which {type(pl_module).__name__} does"
                " not have; rlhfkit's modules do."
            )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write ``<folder>-epoch<k>`` when it is due."""
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
        """Write the final model."""
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
