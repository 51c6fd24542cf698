"""Steps that all ranks take together, so that an error on one is an error on all and nobody waits for ever."""

from collections.abc import Callable
from typing import Any, TypeVar

import lightning as L
import torch.distributed

T = TypeVar("T")


def everywhere(trainer: L.Trainer, step: Callable[[], T]) -> list[T]:
    """Run a step on every rank and exchange the results.

    Args:
        trainer: Tells how many ranks there are.
        step: Called once; its result must be picklable when there is more than one rank.

    Returns:
        The results of all ranks, in order, on every rank.

    Raises:
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
    mine = (result, None if error is None else f"{type(error).__name__}: {error}")
    theirs: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(theirs, mine)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(theirs):
        if message is not None:
            raise RuntimeError(f"rank {rank} failed: {message}")
    return [result for result, _ in theirs]


def same_everywhere(trainer: L.Trainer, condition: bool) -> bool:
    """Whether a condition holds on every rank.

    Args:
        trainer: Tells how many ranks there are.
        condition: This rank's.
    """
    return all(everywhere(trainer, lambda: condition))
