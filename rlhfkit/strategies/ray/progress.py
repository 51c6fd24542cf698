"""Progress bars of ranks on Ray: rank 0 sends the hooks of the bar to the driver, whose bar draws them."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ProgressBar
from tqdm import tqdm

# Attributes of the Trainer that bars read during a run.
_SHOWN = (
    "current_epoch",
    "global_step",
    "is_last_batch",
    "num_predict_batches",
    "num_sanity_val_batches",
    "num_test_batches",
    "num_training_batches",
    "num_val_batches",
    "sanity_checking",
    "state",
    "max_epochs",
)
_HOOKS = [
    name
    for name in dir(Callback)
    if name in ("setup", "teardown") or (name.startswith("on_") and "checkpoint" not in name and name != "on_exception")
]


class RemoteProgressBar(ProgressBar):
    """Replaces the progress bar on a rank: sends the hooks that the bar overrides to the driver.

    ``bar`` is this rank's copy of the driver's bar, which is not drawn; ``post`` sends an event to the driver (``None``
    on ranks whose progress is not shown).
    """

    def __init__(self, bar: ProgressBar, post: Callable[..., Any] | None) -> None:
        super().__init__()
        self._bar, self._post = bar, post
        if post is not None:
            for name in _HOOKS:
                if getattr(type(bar), name) is not getattr(Callback, name):
                    setattr(self, name, partial(self._send, name))

    def disable(self) -> None:
        """Do nothing."""

    def enable(self) -> None:
        """Do nothing."""

    def _send(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Send a hook with its numbers and texts and the metrics, without batches and outputs."""
        assert self._post is not None
        plain = [value if isinstance(value, int | str) else None for value in args]
        plain_named = {name: value if isinstance(value, int | str) else None for name, value in kwargs.items()}
        shown = {name: getattr(trainer, name) for name in _SHOWN}
        metrics: dict[str, Any] = {}
        if hook in ("on_train_batch_end", "on_train_epoch_end") or hook.endswith("validation_end"):
            self._bar._trainer = trainer
            metrics = self._bar.get_metrics(trainer, pl_module)
        self._post("hook", hook, plain, plain_named, shown, metrics)


class _TrainerView:
    """The driver's Trainer with the attributes that rank 0 has sent."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.shown: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.shown[name] if name in self.shown else getattr(self._trainer, name)

    def __reduce__(self) -> Any:
        return _TrainerView, (self._trainer,)  # rich's bar keeps a reference, and is pickled for the next run


class DriverDisplay:
    """Draws the progress bar of ``trainer``, if it has one, and prints lines of ranks in the driver."""

    def __init__(self, trainer: pl.Trainer | None) -> None:
        self._bar = trainer.progress_bar_callback if trainer is not None else None
        if self._bar is not None and trainer is not None:
            self._trainer, self._view = trainer, _TrainerView(trainer)
            vars(self._bar)["get_metrics"] = lambda *_: self._metrics
        self._metrics: dict[str, Any] = {}

    def hook(self, name: str, args: list[Any], kwargs: dict[str, Any], shown: dict[str, Any], metrics: Any) -> None:
        """Call a hook of the bar as rank 0 has called it."""
        if self._bar is None:
            return
        self._view.shown, self._metrics = shown, metrics or self._metrics
        getattr(self._bar, name)(self._view, self._trainer.lightning_module, *args, **kwargs)

    def line(self, rank: int, stream: str, text: str) -> None:
        """Print a line of a rank above the progress bar; rich's bars capture printed text."""
        tqdm.write(text if rank == 0 else f"[rank {rank}] {text}", file=getattr(sys, stream))

    def close(self) -> None:
        """Reconnect the bar with the Trainer."""
        if self._bar is not None:
            del vars(self._bar)["get_metrics"]
            self._bar._trainer = self._trainer
