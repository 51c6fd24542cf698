"""Exchanges between the training ranks, after which all of them know the same, errors too."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rlhfkit.rollout.errors import EngineError


def rank() -> int:
    """This process's rank; 0 where there are no others."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def everyones(mine: Any) -> list[Any]:
    """What every rank has, by rank. A collective.

    Args:
        mine: This rank's; picklable.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, mine)
    return theirs


def agree(error: Exception | None, flags: Any = None) -> tuple[Any, Exception | None]:
    """Exchange the outcome of all ranks. A collective.

    Args:
        error: What went wrong here.
        flags: Rank 0's are returned.

    Returns:
        Rank 0's flags, and an error if any rank has one: its own, or else one that quotes the first that has.
    """
    outcomes = everyones((flags, None if error is None else f"{type(error).__name__}: {error}"))
    for number, (_, text) in enumerate(outcomes):
        if text is not None and error is None:
            error = EngineError(f"rank {number} failed: {text}")
    return outcomes[0][0], error


def together(step: Callable[[], Any]) -> None:
    """A step of every rank; when one raises, all do. A collective.

    Args:
        step: Called once.

    Raises:
        Exception: What ``step`` raised here; on the other ranks an EngineError that quotes it.
    """
    error: Exception | None = None
    try:
        step()
    except Exception as raised:
        error = raised
    _, error = agree(error)
    if error is not None:
        raise error
