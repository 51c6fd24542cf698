"""``AsyncRollouts``: while the trainer learns from one iteration, a thread collects the next ones."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning as L
import torch.distributed

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.protocols import prompts_of
from rlhfkit.rollout.background import BackgroundRollouts
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.validation import check_integer, check_number


class AsyncRollouts:
    """While the trainer learns from iteration i, a thread collects up to iteration i + ``max_staleness``.

    Iteration j is queued when training on iteration ``j - max_staleness`` begins, after its weights were synced, so no
    token is older, and at most ``max_staleness + 1`` iterations exist at a time. Each begins with the prompt at which
    the one before it stopped; the DataModule's cursor moves after the iteration was trained on.

    A sync waits for the iteration being collected, and queued ones wait for the sync. With ``in_flight`` the engine
    swaps the weights between two tokens instead. With an engine in every rank, the ranks' threads exchange samples in
    a process group of their own. ``timeout`` is the seconds that one iteration may take.

    Raises:
        ValueError: If an argument is out of range, or the engine cannot change its weights while it generates.
    """

    def __init__(
        self, collector: GroupCollector, max_staleness: int, timeout: float, *, in_flight: bool = False
    ) -> None:
        engine = collector.engine
        check_integer("max_staleness", max_staleness, minimum=1, why="asynchronous rollouts need some")
        check_number("rollout_timeout", timeout, above=0, why="it is in seconds")
        if in_flight and not engine.updates_in_flight:
            raise ValueError(
                f"in_flight=True changes the weights while the engine generates, and {type(engine).__name__} does not "
                "say that it can (updates_in_flight): use LocalEngine or VLLMPool, or in_flight=False"
            )
        self.collector = collector
        self.max_staleness = max_staleness
        self.timeout = timeout
        self.in_flight = in_flight
        self._jobs: BackgroundRollouts[CollectedGroups] = BackgroundRollouts()
        self._submitted = -1
        self._after: dict[str, Any] | None = None  # where the prompts of the next job begin; written by the thread
        self._failure: BaseException | None = None  # of a job; the jobs behind it fail as well
        self._group: Any = None

    def collect(self, trainer: L.Trainer, wanted: int, sampling: SamplingSpec, iteration: int) -> CollectedGroups:
        """Queue what may be sampled from the current weights, and wait for this iteration. A collective.

        The DataModule's cursor must be at this iteration's prompts.
        """
        if self._submitted < iteration:
            self._begin(trainer, iteration)
        left = float("inf")
        if trainer.max_epochs not in (None, -1):
            left = trainer.max_epochs - trainer.current_epoch
        for number in range(self._submitted + 1, iteration + self.max_staleness + 1):
            if number - iteration < left:
                self._submit(trainer, wanted, sampling, number)
        with self.collector.timing.record("wait", iteration):
            try:
                parts = run_on_all_ranks(lambda: self._result(trainer, iteration))
            except WeightsNeededError:
                self._jobs.clear(self.timeout)
                self._submitted = -1  # the next call queues this iteration and the ones behind it again
                raise
        collected = parts[0]
        assert collected is not None  # rank 0 takes part
        return collected

    def _begin(self, trainer: L.Trainer, iteration: int) -> None:
        """Start at the DataModule's cursor, at the start of a run or after a resume."""
        self._submitted, self._after = iteration - 1, prompts_of(trainer).prompt_queue().after
        self._failure = None
        if self.collector.needs_all_ranks(trainer) and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def _submit(self, trainer: L.Trainer, wanted: int, sampling: SamplingSpec, iteration: int) -> None:
        def job() -> CollectedGroups:
            if self._failure is not None:  # this job would begin with the prompts of the iteration that failed
                raise self._failure
            try:
                collected = self.collector.collect_here(
                    trainer, wanted, sampling, iteration, after=self._after, group=self._group
                )
            except BaseException as error:
                self._failure = error
                raise
            self._after = collected.after
            return collected

        self._submitted = iteration
        if self.collector.takes_part(trainer):
            self._jobs.submit(iteration, job)

    def _result(self, trainer: L.Trainer, iteration: int) -> CollectedGroups | None:
        """Wait for this rank's job; only rank 0 returns the result."""
        if not self.collector.takes_part(trainer):
            return None
        collected = self._jobs.result(iteration, self.timeout)
        return collected if trainer.global_rank == 0 else None

    def updating_weights(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which the engine may be given new weights. A collective."""
        return nullcontext() if self.in_flight else self.paused(trainer)

    @contextmanager
    def paused(self, trainer: L.Trainer) -> Iterator[None]:
        """Wait for the running job and hold queued ones inside the context. A collective.

        Ranks whose threads collect together stop at the newest iteration that any of them has started.
        """

        def newest_of_all(mine: int) -> int:
            return max(gather_objects(mine))

        with self._jobs.paused(self.timeout, agree=newest_of_all):
            yield

    def close(self) -> None:
        """Drop what is queued; the next run draws its prompts again."""
        self._jobs.close()

    def fresh(self) -> "AsyncRollouts":
        """A copy for another run, with an empty queue."""
        return AsyncRollouts(self.collector, self.max_staleness, self.timeout, in_flight=self.in_flight)
