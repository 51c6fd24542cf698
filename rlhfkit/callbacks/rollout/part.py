"""``RolloutPart``: a feature of the rollout side as one object that is passed in."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import lightning as L

from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import GroupCollector, Source
from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.parts import Configured, named_part, of_class
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import GroupRunner


class Rollouts(Protocol):
    """What parts use of the :class:`~rlhfkit.RolloutCallback` that has them, which explains it."""

    engine: RolloutEngine
    engines: Sequence[RolloutEngine]
    groups: "GroupRunner | None"
    reward: Any
    sampling: SamplingSpec
    rollout_timeout: float
    timing: Timing
    collector: GroupCollector
    parts: "list[RolloutPart]"
    overlaps: bool

    def sample(self, prompts: Sequence[Prompt], ways: Mapping[str, SamplingSpec]) -> dict[str, list[Sample]]:
        """Generate and score samples with the current policy, not to be trained on. A collective."""
        ...


class RolloutPart(Configured):
    """A feature of the rollout side, for ``RolloutCallback(parts=[...])``. A subclass overrides what it takes part in.

    Arguments of its ``__init__`` are attributes of the same names, by which :meth:`plain` writes it as in YAML. All
    ranks have the same parts in the same order, so that methods may be collectives. Example, which turns the order of
    an iteration around::

        class Backwards(RolloutPart):
            def wrap(self, source):
                self.source = source
                return self

            def collect(self, ask):
                collected = self.source.collect(ask)
                return dataclasses.replace(collected, prompts=collected.prompts[::-1])
    """

    overlaps: bool = False
    """Whether it lets the engine generate while the policy learns."""
    staleness: int | None = 0
    """Iterations by which it lets tokens be older than the policy that learns; ``None``: any number."""
    replaced: Sequence[Sample] = ()
    """Samples of this rank that others have taken the place of in this iteration."""
    number: int = 0
    """Number among the callback's parts of its class."""
    rollouts: Rollouts
    """The callback that has the part."""

    @property
    def state_key(self) -> str:
        """Key of its state in checkpoints."""
        return f"{type(self).__qualname__}[{self.number}]"

    def attach(self, rollouts: Rollouts) -> None:
        """Become a part of a callback; called once, when it is made, and before anything else.

        A subclass checks here that it fits the engine and the other parts (``rollouts.parts``), after
        ``super().attach(rollouts)``; its arguments in ``__init__``.
        """
        self.rollouts = rollouts

    # ------------------------------------------------------------------ sources

    def wrap_sampling(self, source: Source) -> Source:
        """Return a source around what generates, which runs before engines give back shared devices."""
        return source

    def wrap(self, source: Source) -> Source:
        """Return a source around what has generated; here models of the module may be asked."""
        return source

    # ------------------------------------------------------------------ before a run

    def clear(self) -> None:
        """Forget what belongs to another run."""

    def setup(self, trainer: L.Trainer) -> None:
        """Called before a fit or a validation, before anything is loaded."""

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError before a fit if the configuration cannot work."""

    # ------------------------------------------------------------------ weights and devices, in the order of a sync

    def updating_weights(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which the engine may be given new weights. A collective."""
        return nullcontext()

    def why_copied(self, trainer: L.Trainer) -> str | None:
        """Why an engine in this process cannot use the memory of the policy's weights; ``None``: it can."""
        return None

    def defers_sync(self, trainer: L.Trainer) -> bool:
        """Whether new weights are sent when samples are asked for, and not already when an iteration ends."""
        return False

    def before_start(self, trainer: L.Trainer) -> None:
        """Called before engines are started, which is before each time that they are sent weights."""

    def after_start(self, trainer: L.Trainer) -> None:
        """Called before engines are sent weights, when they run."""

    def after_load(self, trainer: L.Trainer) -> None:
        """Called when engines have new weights, and training still has its own on the device. A collective."""

    def before_generate(self, trainer: L.Trainer) -> None:
        """Called before engines generate or score. A collective."""

    def after_sync(self, trainer: L.Trainer) -> None:
        """Called when engines with new weights can generate. A collective."""

    def after_generate(self, trainer: L.Trainer, iteration: int) -> None:
        """Called when engines have generated and sleep; not if a part :attr:`overlaps`. A collective."""

    def paused(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which nothing is generated for training. A collective."""
        return nullcontext()

    # ------------------------------------------------------------------ an iteration

    def before_collect(self, trainer: L.Trainer, iteration: int) -> None:
        """Called in the main thread before the groups of an iteration are collected, after the sync. A collective."""

    def after_prepare(self, trainer: L.Trainer, iteration: int) -> None:
        """Called when the module has prepared the iteration."""

    def add_scores(self, trainer: L.Trainer, samples: Sequence[Sample], iteration: int) -> None:
        """Add to the rewards of this rank's samples, in place; called for those of validation. A collective."""

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Look at an iteration, and return what is logged of it, equal on all ranks. A collective.

        ``version`` is that of the policy that learns.
        """
        return {}

    def end_iteration(self, next_iteration: int) -> None:
        """Called when an iteration was trained on."""

    def logged(self, trainer: L.Trainer, iteration: int) -> None:
        """Called when an iteration's metrics are logged."""

    # ------------------------------------------------------------------ validation

    def validate(self, trainer: L.Trainer, prompts: Sequence[Prompt], *, first: bool) -> None:
        """Called with a batch of validation prompts, this rank's; ``first``: of this validation. A collective."""

    def end_validation(self, trainer: L.Trainer) -> None:
        """Called after the last batch. A collective."""

    # ------------------------------------------------------------------ checkpoints and the end

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
        """Drop what is unfinished, at the end of a fit or after an error, when the engines are closed."""

    def recover(self) -> None:
        """Called at the end of a fit or validation or after an error, at last. Not a collective."""


def make_rollout_part(given: "RolloutPart | Mapping[str, Any] | str") -> RolloutPart:
    """A part that is given as itself, as :meth:`RolloutPart.plain`, or by the dotted name of its class.

    Raises:
        TypeError: If it is something else, or a class without its arguments.
        ValueError: If a name cannot be found.
    """
    if isinstance(given, RolloutPart):
        return given
    kind, arguments = named_part(given)
    return of_class(kind, RolloutPart, "rlhfkit.callbacks.RolloutPart")(**arguments)
