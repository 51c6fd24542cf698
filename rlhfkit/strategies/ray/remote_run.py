"""A run as it travels: the Trainer to the ranks, and what training changed back to the driver."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn, TrainerState
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rlhfkit.strategies.deepspeed.zero3 import full_state_dict
from rlhfkit.strategies.ray import actor as ray_actor
from rlhfkit.strategies.ray.progress import RemoteProgressBar

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def pack(
    function: Callable[..., Any], args: Any, kwargs: Any, trainer: pl.Trainer | None, return_weights: bool
) -> bytes:
    """What :meth:`~rlhfkit.strategies.ray.actor.RankActor.run` shall call; the Trainer and its methods stay one object.

    Raises:
        TypeError: When something cannot be sent to another process.
    """
    import ray.cloudpickle

    work: Callable[[Any], Any]
    if trainer is None:
        work = partial(ray_actor.just_call, function, args, kwargs)
    else:
        work = partial(perform, _GlobalStateSnapshot.capture(), function, args, kwargs, trainer, return_weights)
    try:
        return ray.cloudpickle.dumps(work)
    except Exception as error:
        raise TypeError(
            "The Trainer, its module, callbacks, loggers and data are sent to the ranks and must be picklable; open"
            " files, locks, running engines and the like belong into setup(). A module that was trained in this process"
            " holds objects of DeepSpeed's: make a new one and give it the weights with load_state_dict."
            f" {type(error).__name__}: {error}"
        ) from error


def perform(
    snapshot: _GlobalStateSnapshot,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    trainer: Any,
    return_weights: bool,
    actor: ray_actor.RankActor,
) -> "RunResult | None":
    """On a rank: run a Trainer's method and collect what the driver gets.

    Args:
        snapshot: Random states and flags of the driver.
        function: ``trainer._fit_impl`` or the like.
        args: Its arguments.
        kwargs: Its arguments.
        trainer: This rank's copy.
        return_weights: Whether trained weights are collected.
        actor: This rank.
    """
    snapshot.restore()
    trainer.strategy._launcher = None  # what callbacks start from here runs here
    if trainer.progress_bar_callback is not None:
        place = trainer.callbacks.index(trainer.progress_bar_callback)
        post = actor.post if actor.rank == 0 else None
        trainer.callbacks[place] = RemoteProgressBar(trainer.progress_bar_callback, post)
    try:
        value = function(*args, **kwargs)
    except BaseException as error:
        actor.report(error)  # first: the hooks may take long, or wait for ever for ranks that are well
        call._interrupt(trainer, error)  # Lightning calls it in the driver only
        raise
    return RunResult.of(trainer, value, return_weights)


@dataclass
class RunResult:
    """What a run changed on rank 0."""

    value: Any
    """What ``trainer.validate``, ``test`` or ``predict`` returns."""
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
    def of(cls, trainer: Any, value: Any, return_weights: bool) -> "RunResult | None":
        """Collect on all ranks, as weights may be sharded; None on all but rank 0."""
        weights = None
        if return_weights and trainer.state.fn == TrainerFn.FITTING:
            weights = changed_weights(trainer)
        if not trainer.is_global_zero:
            return None
        data = getattr(trainer, "datamodule", None)
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"] = {}  # of loaders, which the driver has in their first state
        return cls(
            value=move_data_to_device(value, torch.device("cpu")),
            state=trainer.state,
            callbacks={cb.state_key: state for cb in trainer.callbacks if (state := cb.state_dict())},
            metrics={name: move_data_to_device(dict(getattr(trainer, name)), torch.device("cpu")) for name in _METRICS},
            loops=loops,
            data=data.state_dict() if data is not None else None,
            weights=weights,
        )

    def restore(self, trainer: Any, data: pl.LightningDataModule | None) -> None:
        """Put everything into the driver's objects."""
        trainer.state = self.state
        for name, values in self.metrics.items():
            getattr(trainer, name).update(values)
        for callback in trainer.callbacks:
            state = self.callbacks.get(callback.state_key)
            if state is None:
                continue
            if getattr(callback, "dirpath", "") is None:  # ModelCheckpoint ignores the state of another folder
                callback.dirpath = state.get("dirpath")
            callback.load_state_dict(state)
        trainer.fit_loop.load_state_dict(self.loops)
        _mark_not_resuming(trainer.fit_loop)
        if data is not None and self.data:
            data.load_state_dict(self.data)
        if self.weights is not None:
            load_weights(trainer.lightning_module, self.weights)


def changed_weights(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Full weights of everything but the strategy's frozen children, on the CPU of rank 0. A collective."""
    module, keep = trainer.lightning_module, trainer.is_global_zero
    frozen: set[str] = getattr(trainer.strategy, "_frozen", set())
    state: dict[str, Tensor] = {}
    for name, child in module.named_children():
        if name not in frozen:
            state |= {f"{name}.{key}": tensor for key, tensor in full_state_dict(child, keep=keep).items()}
    if keep:
        own = module.state_dict()
        state |= {key: tensor.detach().cpu() for key, tensor in own.items() if "." not in key}
    return state


def load_weights(module: pl.LightningModule, weights: dict[str, Tensor]) -> None:
    """Load trained weights into the driver's module; children that it lacks are built by ``configure_model``."""
    if not {name.partition(".")[0] for name in weights} <= {name.partition(".")[0] for name in module.state_dict()}:
        module.configure_model()
    unexpected = module.load_state_dict(weights, strict=False).unexpected_keys
    if unexpected:
        rank_zero_warn(
            f"{len(unexpected)} trained tensors, {unexpected[0]!r} the first, have no place in the driver's"
            f" {type(module).__name__} and stayed behind: build children in __init__ or configure_model, not in setup."
        )


def _mark_not_resuming(loop: _Loop) -> None:
    """Counters were loaded; the loop is where a finished run leaves it, not where a checkpoint resumes."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            _mark_not_resuming(child)
