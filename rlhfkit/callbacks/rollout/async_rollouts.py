"""``AsyncRollouts``: asynchronous rollouts: while the trainer learns from one iteration, a thread samples the next."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.rollout.background import BackgroundRollouts
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.validation import check_integer, check_number


class AsyncRollouts:
    """While the trainer learns from iteration i, a thread samples up to i + ``max_staleness``.

    Iteration j is queued when iteration ``j - max_staleness`` begins to be trained on, after its weights were
    published, so no token is older than that, and no more than ``max_staleness + 1`` iterations exist at a time. Each
    begins with the prompt at which the one before it stopped; the DataModule's cursor moves when it was trained on.

    New weights wait for the iteration that is being sampled, and the ones behind it wait for the weights. With
    ``in_flight`` they do not wait: the engine swaps them in between two tokens, and what is being sampled goes on with
    them.

    With an engine in every rank the ranks' threads exchange their samples, in a process group of their own.

    Args:
        collector: Samples and scores.
        max_staleness: Iterations, at least 1.
        timeout: Seconds that one iteration may take.
        in_flight: Publish while sampling.

    Raises:
        ValueError: If an argument is out of range, or the engine cannot change its weights while it generates.
    """

    def __init__(
        self, collector: GroupCollector, max_staleness: int, timeout: float, *, in_flight: bool = False
    ) -> None:
        engine = collector.generation.engine
        check_integer("max_staleness", max_staleness, minimum=1, why="sampling ahead needs some")
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
        self._after: dict[str, Any] | None = None  # where the draws of the next job begin; the thread's
        self._failure: BaseException | None = None  # of a job; those behind it fail as well
        self._group: Any = None

    def sample(self, trainer: Any, wanted: int, sampling: SamplingSpec, iteration: int) -> CollectedGroups:
        """Queue what may be sampled from the current weights, and wait for this iteration. A collective.

        Args:
            trainer: With a DataModule whose cursor is at this iteration's prompts.
            wanted: Groups per iteration.
            sampling: How to sample.
            iteration: The one to be trained on now.
        """
        if self._submitted < iteration:
            self._begin(trainer, iteration)
        left = trainer.max_epochs - trainer.current_epoch if trainer.max_epochs not in (None, -1) else float("inf")
        for number in range(self._submitted + 1, iteration + self.max_staleness + 1):
            if number - iteration < left:
                self._submit(trainer, wanted, sampling, number)
        with self.collector.generation.timing.record("wait", iteration):
            try:
                parts = run_on_all_ranks(lambda: self._result(trainer, iteration))
            except WeightsNeededError:
                self._jobs.clear(self.timeout)
                self._submitted = -1  # a second call queues this iteration and the ones behind it anew
                raise
        filled = parts[0]
        assert filled is not None  # rank 0 takes part
        return filled

    def _begin(self, trainer: Any, iteration: int) -> None:
        """Nothing is queued: the first iteration of this run, or of a run that goes on from a checkpoint."""
        self._submitted, self._after = iteration - 1, trainer.datamodule.draws().after
        self._failure = None
        if self.collector.per_rank(trainer) and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def _submit(self, trainer: Any, wanted: int, sampling: SamplingSpec, iteration: int) -> None:
        def job() -> CollectedGroups:
            if self._failure is not None:  # it would begin with the prompts of the iteration that failed
                raise self._failure
            try:
                filled = self.collector.fill(trainer, wanted, sampling, iteration, after=self._after, group=self._group)
            except BaseException as error:
                self._failure = error
                raise
            self._after = filled.after
            return filled

        self._submitted = iteration
        if self.collector.takes_part(trainer):
            self._jobs.submit(iteration, job)

    def _result(self, trainer: Any, iteration: int) -> CollectedGroups | None:
        """This rank's wait; rank 0's result is everybody's."""
        if not self.collector.takes_part(trainer):
            return None
        filled = self._jobs.result(iteration, self.timeout)
        return filled if trainer.global_rank == 0 else None

    def publishing(self, trainer: Any) -> AbstractContextManager[None]:
        """Inside, the engine may be given new weights. A collective."""
        return nullcontext() if self.in_flight else self.held(trainer)

    @contextmanager
    def held(self, trainer: Any) -> Iterator[None]:
        """Inside, the engine is the caller's: what is being sampled has ended, what is queued waits. A collective.

        Ranks whose threads sample together stop at the same iteration: the newest that any of them has begun.
        """

        def newest_of_all(mine: int) -> int:
            return max(gather_objects(mine))

        with self._jobs.held(self.timeout, agree=newest_of_all):
            yield

    def close(self) -> None:
        """Forget what is queued; its prompts come again in the next run, as the cursor has not passed them."""
        self._jobs.close()

    def fresh(self) -> "AsyncRollouts":
        """One for another run, with nothing queued."""
        return AsyncRollouts(self.collector, self.max_staleness, self.timeout, in_flight=self.in_flight)
