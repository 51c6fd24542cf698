"""``NonFiniteGuard``: skip updates whose loss or gradient is not finite, and stop after too many in a row."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed.tensor
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.optim import Optimizer

from rlhfkit.protocols import RLHFStrategy
from rlhfkit.validation import check_integer


class NonFiniteError(RuntimeError):
    """Too many updates in a row were skipped; the message names the folder with the batches."""


class NonFiniteGuard(Callback):
    """Skip an update when a loss or gradient is not finite on any rank, and stop after too many in a row.

    A skipped update leaves weights and optimizer state bitwise unchanged on all ranks; learning-rate schedules and
    ``global_step`` advance. ``RLHFDeepSpeedStrategy`` skips updates itself, and this callback only counts and stops;
    under other strategies it drops the gradients before the optimizer steps. ``skipped_updates`` is logged. An fp16
    overflow is not counted while the dynamic loss scale can still be lowered.

    Before stopping, each rank writes the micro-batches of the last skipped update, and which of their losses were
    finite, to ``<folder>/step=<global_step>/rank_00000.pt``. The weights are those before the first skipped update, so
    the batches reproduce the problem with the last checkpoint before it::

        dump = torch.load("non_finite/step=120/rank_00000.pt", weights_only=True)
        batch = Experience.from_state_dict(dump["batches"][0]["batch"])

    Args:
        max_skipped_updates: Stop when this many updates in a row were skipped; 10 is our choice. ``None``: never stop.
        folder: Where batches are written; ``None``: ``non_finite`` in the Trainer's ``default_root_dir``.

    Raises:
        ValueError: When ``max_skipped_updates`` is below 1.
    """

    def __init__(self, max_skipped_updates: int | None = 10, folder: str | Path | None = None) -> None:
        check_integer("max_skipped_updates", max_skipped_updates, minimum=1, optional=True, why="None goes on for ever")
        self.max_skipped_updates = max_skipped_updates
        self.folder = folder
        self.skipped_updates = 0
        """Skipped updates of this run."""
        self.in_a_row = 0
        """Skipped updates since the last one that was not skipped."""
        self._new_window()

    def _new_window(self) -> None:
        self._window: list[dict[str, Any]] = []
        self._losses: Tensor | float = 0.0
        self._dropped = 0
        self._stepped = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise MisconfigurationException under Lightning's DeepSpeed strategies, whose gradients cannot be dropped."""
        if isinstance(trainer.strategy, DeepSpeedStrategy) and _counted_by_strategy(trainer) is None:
            raise MisconfigurationException(
                "NonFiniteGuard cannot drop gradients under Lightning's DeepSpeedStrategy; use"
                " Trainer(strategy='rlhf_zero2') or another of RLHFDeepSpeedStrategy's names."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reset the counters."""
        self.skipped_updates = _counted_by_strategy(trainer) or 0
        self.in_a_row = 0
        self._new_window()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the micro-batches of the accumulation window."""
        self._window.append({"batch_index": batch_idx, "finite_loss": True, "batch": batch})

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Check the loss without waiting for the device."""
        finite = torch.isfinite(loss.detach()).all()
        self._window[-1]["finite_loss"] = finite & self._window[-1]["finite_loss"]
        self._losses = self._losses + (~finite).float()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Drop the gradients if a loss or gradient is not finite on any rank. A collective.

        An optimizer skips parameters without gradient, and their state.
        """
        self._stepped = True
        if _counted_by_strategy(trainer) is not None:
            return
        found = torch.stack(
            [torch.as_tensor(self._losses, device=pl_module.device), _any_not_finite(optimizer).to(pl_module.device)]
        )
        bad_loss, bad_gradient = trainer.strategy.reduce(found, reduce_op="sum").tolist()
        if bad_loss or (bad_gradient and not _loss_scale_can_fall(trainer)):
            optimizer.zero_grad(set_to_none=True)
            self._dropped += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count and log skipped updates; too many raise NonFiniteError on all ranks, after each wrote its batches."""
        if not self._stepped:
            return
        total = _counted_by_strategy(trainer)
        if total is None:
            total = self.skipped_updates + self._dropped
            # Lightning would copy a number to the device, for which the host waits.
            pl_module.log("skipped_updates", torch.full((), float(total), device=pl_module.device))
        skipped, self.skipped_updates = total - self.skipped_updates, total
        self.in_a_row = self.in_a_row + skipped if skipped else 0
        if self.max_skipped_updates is not None and self.in_a_row >= self.max_skipped_updates:
            folder = self._dump(trainer)
            raise NonFiniteError(
                f"{self.in_a_row} updates in a row were skipped because a loss or gradient was not finite on some rank"
                f" (global_step {trainer.global_step}). The micro-batches of the last one are in {folder}, one file per"
                " rank. Check them, the learning rate and the data; the weights are those from before these updates."
            )
        self._new_window()

    def _dump(self, trainer: L.Trainer) -> Path:
        """Write this rank's window in types that load with ``weights_only=True``."""
        folder = Path(self.folder or Path(trainer.default_root_dir) / "non_finite") / f"step={trainer.global_step}"
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        content = {"global_step": trainer.global_step, "rank": trainer.global_rank, "batches": self._window}
        torch.save(plain(content), folder / f"rank_{trainer.global_rank:05d}.pt")
        trainer.strategy.barrier("non_finite")  # the launcher ends all ranks once the first has raised
        return folder


def plain(value: Any) -> Any:
    """Convert a value to CPU tensors and plain types, so that it loads with ``weights_only=True``.

    Values with a ``state_dict`` become that dictionary, dataclasses one of their fields, unknown types their ``repr``.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if callable(getattr(value, "state_dict", None)):  # such as a PaddedBatch
        return plain(value.state_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int) else repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


def _counted_by_strategy(trainer: L.Trainer) -> int | None:
    """The count of a strategy that skips updates by itself; None under other strategies."""
    strategy = trainer.strategy
    return strategy.skipped_updates if isinstance(strategy, RLHFStrategy) else None


def _any_not_finite(optimizer: Optimizer) -> Tensor:
    """() float32, 1 if the norm of this rank's gradients is not a finite float32, else 0."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    shards = [g.to_local() if isinstance(g, torch.distributed.tensor.DTensor) else g for g in gradients]
    if not shards:
        return torch.zeros(())
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in shards])
    return (~torch.isfinite(norms.square().sum())).float()


def _loss_scale_can_fall(trainer: L.Trainer) -> bool:
    """Whether a gradient scaler can still lower its scale after an overflow; we take 1 for its minimum."""
    plugin = trainer.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision | FSDPPrecision) else None
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1.0
