"""``Source``: where the groups of an iteration come from; and ``RolloutPart``: a feature that wraps it or hooks in.

The innermost source draws prompts, generates, scores and selects
(:class:`~rlhfkit.callbacks.rollout.group_collector.GroupCollector`). What a run uses besides is around it, from the
inside to the outside: sampling ahead, scores of models of the module, replay.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L

from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.data.types import Sample
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import SamplingSpec


@dataclass(frozen=True)
class Ask:
    """What a source is asked for, the same on every rank."""

    trainer: L.Trainer
    """Its module writes samples as text, its DataModule has the prompts."""
    iteration: int
    """Number of the iteration, part of each sample's seed."""
    wanted: int
    """Groups of all ranks."""
    sampling: SamplingSpec
    """How to sample."""


class Source(Protocol):
    """Gives the groups of iterations, in order."""

    def collect(self, ask: Ask) -> CollectedGroups:
        """Return the scored groups of an iteration, of this rank its share. Called on every rank."""
        ...


class RolloutPart:
    """A feature of the rollout side, for ``RolloutCallback(parts=[...])``. A subclass overrides what it takes part in.

    Example, which turns the order of an iteration around::

        class Backwards(RolloutPart):
            def wrap(self, source):
                self.source = source
                return self

            def collect(self, ask):
                collected = self.source.collect(ask)
                return dataclasses.replace(collected, prompts=collected.prompts[::-1])

    All ranks have the same parts in the same order, so that methods may be collectives.
    """

    name: str = ""
    """Key of its state in checkpoints; empty: it has none."""
    overlaps: bool = False
    """Whether it lets the engine generate while the policy learns."""

    def attach(self, rollouts: L.Callback) -> None:
        """Take the ``RolloutCallback`` that has the part, once, before anything else; nothing by default."""

    # ------------------------------------------------------------------ sources

    def wrap_sampling(self, source: Source) -> Source:
        """Return a source around what generates, which runs before engines give back shared devices."""
        return source

    def wrap(self, source: Source) -> Source:
        """Return a source around what has generated; here models of the module may be asked."""
        return source

    # ------------------------------------------------------------------ hooks, in the order in which they are called

    def clear(self) -> None:
        """Forget what belongs to another run."""

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError before a fit if the configuration cannot work."""

    def updating_weights(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which the engine may be given new weights. A collective."""
        return nullcontext()

    def paused(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which nothing is generated for training. A collective."""
        return nullcontext()

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Return what is logged of an iteration, equal on all ranks; ``version`` is the policy's that learns."""
        return {}

    @property
    def replaced(self) -> Sequence[Sample]:
        """Samples of this rank that others have taken the place of in this iteration."""
        return ()

    def end_iteration(self, next_iteration: int) -> None:
        """Called when an iteration was trained on."""

    def logged(self, trainer: L.Trainer, iteration: int) -> None:
        """Called when an iteration's metrics are logged."""

    def state_dict(self, next_iteration: int) -> Any:
        """Return this rank's state for a checkpoint after which ``next_iteration`` is sampled."""
        return []

    def load_state_dict(self, own: Iterable[Any], states: Iterable[Any], *, rank: int, world_size: int) -> None:
        """Take a saved state.

        Args:
            own: The entries that this rank's file has.
            states: Those that this rank takes over, of several saved ranks if there are fewer ranks now.
            rank: This rank.
            world_size: Ranks now.
        """

    def close(self) -> None:
        """Drop what is unfinished, at the end of a fit or after an error."""


class SeparateDevices:
    """Engines have devices of their own, or share memory with training as they are: nothing has to make room.

    :class:`~rlhfkit.callbacks.rollout.parts.shared_devices.SharedDevices` has the same methods for engines that do.
    """

    colocate = False

    def __init__(self, engines: Sequence[Any], offload_training: bool | None = None) -> None:
        self._engines = engines
        self.offload_training = offload_training

    def offloads(self, trainer: L.Trainer) -> bool:
        """Whether training states leave the device while engines generate."""
        return False

    def start(self, trainer: L.Trainer, start: Any) -> None:
        """Start the engines. A collective."""
        run_on_all_ranks(start)

    def generate(self, trainer: L.Trainer) -> None:
        """Make room for what engines need."""

    def learn(self, trainer: L.Trainer, iteration: int) -> None:
        """Have the engines sleep."""
        for engine in self._engines:
            engine.sleep()

    def recover(self) -> None:
        """Bring the training states back after an error, or at the end."""

    def metrics(self) -> dict[str, float]:
        """What is logged of memory."""
        return {}
