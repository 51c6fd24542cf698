"""Send the Trainer to the ranks, run it there, and bring back what training has changed."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from rlhfkit.distributed import full_shape
from rlhfkit.strategies.checkpoint.io import EngineCheckpointMixin
from rlhfkit.strategies.deepspeed.zero3 import full_state_dict
from rlhfkit.strategies.ray import actor as ray_actor
from rlhfkit.trainer_parts import callbacks_of, datamodule_of

MAX_RETURNED_BYTES = 8e9
"""Trained weights above this size are returned to the driver only on request."""

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def pickle_run(
    function: Callable[..., Any], args: Any, kwargs: Any, trainer: pl.Trainer | None, return_weights: bool | None
) -> bytes:
    """Pickle a call and its Trainer, if any, for ``RankActor.run``; TypeError if something cannot be pickled."""
    import ray.cloudpickle

    def call_function(actor: ray_actor.RankActor) -> Any:  # pickled by value, so it does not import this file
        return function(*args, **kwargs)

    work: Callable[[ray_actor.RankActor], Any] = call_function
    if trainer is not None:
        work = partial(_call_trainer, _GlobalStateSnapshot.capture(), function, args, kwargs, trainer, return_weights)
    try:
        pickled: bytes = ray.cloudpickle.dumps(work)
        return pickled
    except Exception as error:
        raise TypeError(
            "The Trainer, its module, callbacks, loggers and data are sent to the ranks and must be picklable; open"
            " files, locks, running engines and the like belong into setup(). A module that was trained in this process"
            " holds objects of DeepSpeed's: make a new one and give it the weights with load_state_dict."
            f" {type(error).__name__}: {error}"
        ) from error


def _call_trainer(
    snapshot: _GlobalStateSnapshot,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    trainer: pl.Trainer,
    return_weights: bool | None,
    actor: ray_actor.RankActor,
) -> "RunResult | None":
    """Call a method of this rank's Trainer and collect its result; ``snapshot`` holds the driver's random states."""
    snapshot.restore()
    trainer.strategy._launcher = None  # runs that callbacks start stay in this process
    callbacks, bar = callbacks_of(trainer), trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar):  # it draws on terminals and in notebooks only, and the driver has them
        callbacks[callbacks.index(bar)] = TQDMProgressBar(refresh_rate=int(bar.refresh_rate))
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        actor.report(error)  # first: the hooks may take long, or wait forever for the other ranks
        call._interrupt(trainer, error)  # calls the hooks for errors, which Lightning does in the driver only
        raise
    return RunResult.collect(trainer, value, return_weights)


@dataclass
class RunResult:
    """State of rank 0 that a run has changed."""

    value: Any
    """Return value of ``trainer.validate``, ``test`` or ``predict``."""
    state: TrainerState
    callbacks: dict[str, dict[str, Any]]
    """``Callback.state_dict()`` by state key."""
    metrics: dict[str, dict[str, Any]]
    loops: dict[str, Any]
    """Counters of the fit loop."""
    data: dict[str, Any] | None
    """``LightningDataModule.state_dict()``."""
    weights: dict[str, Tensor] | None = field(repr=False, default=None)

    @classmethod
    def collect(cls, trainer: pl.Trainer, value: Any, return_weights: bool | None) -> "RunResult | None":
        """Return the result on rank 0, ``None`` on other ranks. A collective, as weights may be sharded."""
        weights = None
        if trainer.state.fn == TrainerFn.FITTING and wants_weights(trainer, return_weights):
            weights = changed_weights(trainer)
        if not trainer.is_global_zero:
            return None
        data = datamodule_of(trainer)
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # states of loaders; the driver's start anew
        return cls(
            value=move_data_to_device(value, torch.device("cpu")),
            state=trainer.state,
            callbacks={cb.state_key: state for cb in callbacks_of(trainer) if (state := cb.state_dict())},
            metrics={name: move_data_to_device(dict(getattr(trainer, name)), torch.device("cpu")) for name in _METRICS},
            loops=loops,
            data=data.state_dict() if data is not None else None,
            weights=weights,
        )

    def restore(self, trainer: pl.Trainer, data: pl.LightningDataModule | None) -> None:
        """Load the result into the driver's objects."""
        trainer.state = self.state
        for name, values in self.metrics.items():
            getattr(trainer, name).update(values)
        for callback in callbacks_of(trainer):
            state = self.callbacks.get(callback.state_key)
            if state is None:
                continue
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = state.get("dirpath")  # it ignores the state of another folder
            callback.load_state_dict(state)
        trainer.fit_loop.load_state_dict(self.loops)
        _mark_not_resuming(trainer.fit_loop)
        if data is not None and self.data:
            data.load_state_dict(self.data)
        if self.weights is not None:
            load_weights(trainer.lightning_module, self.weights)


def wants_weights(trainer: pl.Trainer, return_weights: bool | None) -> bool:
    """Whether to send trained weights to the driver; ``None``: if they are small, else a log line says what to do."""
    if return_weights is not None:
        return return_weights
    size = sum(
        math.prod(full_shape(tensor)) * tensor.element_size()
        for _, child in _changed_children(trainer)
        for tensor in (*child.parameters(), *child.buffers())
    )
    if size <= MAX_RETURNED_BYTES:
        return True
    rank_zero_info(
        f"The trained weights ({size / 1e9:,.1f} GB) are not sent to the driver, whose module keeps its own: use"
        " HFExport or ModelCheckpoint to keep them, or RLHFDeepSpeedStrategy(return_weights=True) if they fit into the"
        " memory of rank 0's and the driver's machine."
    )
    return False


def _changed_children(trainer: pl.Trainer) -> list[tuple[str, nn.Module]]:
    strategy = trainer.strategy
    frozen = strategy.frozen_children if isinstance(strategy, EngineCheckpointMixin) else set()
    return [(name, child) for name, child in trainer.lightning_module.named_children() if name not in frozen]


def changed_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the full weights except those of frozen children, on the CPU of rank 0. A collective."""
    module, keep = trainer.lightning_module, trainer.is_global_zero
    state: dict[str, Tensor] = {}
    for name, child in _changed_children(trainer):
        state |= {f"{name}.{key}": tensor for key, tensor in full_state_dict(child, keep=keep).items()}
    if keep:
        own = module.state_dict()
        state |= {key: tensor.detach().cpu() for key, tensor in own.items() if "." not in key}
    return state


def load_weights(module: pl.LightningModule, weights: dict[str, Tensor]) -> None:
    """Load trained weights into the driver's module; ``configure_model`` builds missing children."""
    if not {name.partition(".")[0] for name in weights} <= {name.partition(".")[0] for name in module.state_dict()}:
        module.configure_model()
    unexpected = module.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        rank_zero_warn(
            f"{len(unexpected)} trained tensors, {unexpected[0]!r} the first, have no place in the driver's"
            f" {type(module).__name__} and stayed behind: build children in __init__ or configure_model, not in setup."
        )


def _mark_not_resuming(loop: _Loop) -> None:
    """Clear the flags that loading counters has set: the run is finished and not being resumed."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            _mark_not_resuming(child)
