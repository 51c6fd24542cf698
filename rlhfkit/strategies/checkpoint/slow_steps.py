"""Slow steps of checkpoints, such as hashing and converting: ranks wait on a store and not in a collective.

A step of minutes would end with the time limit of the process group; here it has a limit of its own, and the error
names the ranks that are late or dead.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.rank_store import RankError, RankLog, rank_store

T = TypeVar("T")

_LOG = "slow steps of checkpoints"


def on_all_ranks(
    step: Callable[[], T], *, timeout: float, doing: str, log: str = _LOG, in_thread: bool = True
) -> list[T]:
    """Run a slow step on every rank and return the picklable results, by rank. A collective.

    Args:
        step: Called once on every rank.
        timeout: Seconds that ranks wait for one another.
        doing: The step in messages, for example ``"verifying last.ckpt"``.
        log: Name of the log on the rank store; threads that take steps at the same time need different ones.
        in_thread: Whether the step runs in a thread, which is left behind when another rank fails or time is over.

    Raises:
        CheckpointError: On all ranks but those whose step raised something else: if the step failed on any rank, took
            longer, or a rank died.
    """
    if get_world_size() == 1:
        return [step()]
    messages = rank_store().log(log)
    _run(messages, lambda: messages.append(messages.call(step) if in_thread else step()), timeout=timeout, doing=doing)
    results: dict[int, T] = dict(RankLog(messages.store, messages.name).read())  # from the beginning
    messages.store.wait_for_readers(messages.name)  # rank 0 may end after this step, and the store with it
    return [results[rank] for rank in range(get_world_size())]


def on_rank_zero(step: Callable[[], T], *, timeout: float, doing: str, log: str = _LOG) -> T:
    """Run a slow step on rank 0 and return its picklable result on all ranks; arguments and errors as above.

    A CheckpointError of the step is raised on all ranks with the same message. A collective.
    """

    def attempt() -> tuple[T | None, CheckpointError | None]:
        if get_rank() != 0:
            return None, None
        try:
            return step(), None
        except CheckpointError as error:
            return None, error

    result, error = on_all_ranks(attempt, timeout=timeout, doing=doing, log=log)[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T itself may be optional


class Phases:
    """What a rank does in :func:`run_in_phases`: its share of the work, phase by phase."""

    def __init__(self, log: RankLog) -> None:
        self.rank = log.store.rank
        self._world_size = log.store.world_size
        self.interrupted = False
        """Whether the step was ended while it waited, by the failure of another rank or by its time limit."""
        self._log = log
        self._phase = 0
        self._results: dict[int, list[list[Any]]] = {}  # by phase, of the ranks that have finished it

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of a list that all ranks have in the same order."""
        return work[self.rank :: self._world_size]

    def gather(self, results: list[Any]) -> list[Any]:
        """End a phase: wait for all ranks and return what they pass, picklable, in any order."""
        self.interrupted = True
        self._log.append((self._phase, results))
        while len(self._results.get(self._phase, [])) < self._world_size:
            for _, (phase, part) in self._log.read(1.0):
                self._results.setdefault(phase, []).append(part)
        self.interrupted = False
        self._phase += 1
        return [result for part in self._results.pop(self._phase - 1) for result in part]


def run_in_phases(step: Callable[[Phases], T], *, timeout: float, doing: str) -> T:
    """Run a step in which ranks share work and wait for one another between phases; errors as above. A collective.

    If a rank fails, :meth:`Phases.gather` ends the steps of the others with an exception, which they must not catch.
    """
    log = rank_store().log(_LOG)
    return _run(log, lambda: step(Phases(log)), timeout=timeout, doing=doing)


def _run(log: RankLog, step: Callable[[], T], *, timeout: float, doing: str) -> T:
    what = f"{doing} (time limit: the strategy's checkpoint_timeout)"
    try:
        return log.run(step, timeout=timeout, waiting_for=what, error_type=CheckpointError)
    except (TimeoutError, RankError) as error:
        raise CheckpointError(f"{error}") from error
