"""Steps that all ranks take together, so that an error on one is an error on all and nobody waits for ever."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import lightning as L
import torch.distributed
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo, WeightSource
from rlhfkit.rollout.errors import WeightsNeededError

T = TypeVar("T")


def everywhere(trainer: L.Trainer, step: Callable[[], T], *, group: Any = None) -> list[T]:
    """Run a step on every rank and exchange the results.

    Args:
        trainer: Tells how many ranks there are.
        step: Called once; its result must be picklable when there is more than one rank.
        group: Process group to exchange in; ``None``: the default one. A thread beside the training loop needs its own.

    Returns:
        The results of all ranks, in order, on every rank.

    Raises:
        WeightsNeededError: If this is what every failed rank raised; all can do something about it together.
        Exception: What ``step`` raised here; on the other ranks a RuntimeError that names the rank and the error.
    """
    if trainer.world_size == 1:
        return [step()]
    result: Any = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as raised:  # told to the other ranks below, then raised here
        error = raised
    curable = isinstance(error, WeightsNeededError)
    mine = (result, None if error is None else f"{type(error).__name__}: {error}", curable)
    theirs: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(theirs, mine, group=group)
    if error is not None and not curable:
        raise error
    failed = [(rank, message, needs) for rank, (_, message, needs) in enumerate(theirs) if message is not None]
    for rank, message, _ in sorted(failed, key=lambda one: one[2]):  # what nothing can be done about comes first
        if all(needs for *_, needs in failed):
            raise error or WeightsNeededError(f"rank {rank} failed: {message}")
        raise RuntimeError(f"rank {rank} failed: {message}")
    return [result for result, *_ in theirs]


def same_everywhere(trainer: L.Trainer, condition: bool) -> bool:
    """Whether a condition holds on every rank.

    Args:
        trainer: Tells how many ranks there are.
        condition: This rank's.
    """
    return all(everywhere(trainer, lambda: condition))


class ReadToTheEnd:
    """A weight source that a rank can read to its end when its engine has failed: the others wait in its collectives.

    Args:
        weights: The source; reading it may be a collective.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._reading: Iterator[tuple[str, Tensor]] | None = None

    def metadata(self) -> list[WeightInfo]:
        """See :meth:`~rlhfkit.rollout.engine.WeightSource.metadata`."""
        return self._weights.metadata()

    def as_saved(self) -> "ReadToTheEnd":
        """See :meth:`~rlhfkit.rollout.engine.WeightSource.as_saved`."""
        self._weights = self._weights.as_saved()
        return self

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and full tensors; an engine that stops reading does not close the iterator."""
        self._reading = iter(self._weights)
        return self._reading

    def finish(self) -> None:
        """Read what nobody has read."""
        for _ in self._reading or self:
            pass
