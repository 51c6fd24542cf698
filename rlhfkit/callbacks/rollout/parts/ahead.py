"""``Ahead``: while the trainer learns from one iteration, threads collect the next ones."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning as L

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.metrics import staleness_metrics
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.distributed import gather_objects
from rlhfkit.rollout.background import BackgroundRollouts
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.rollout.prompt_draws import OverlappingDraws
from rlhfkit.trainer_parts import prompts_of
from rlhfkit.validation import check_integer, check_number


class Ahead(RolloutPart):
    """While the trainer learns from iteration i, threads collect up to iteration i + ``max_staleness``.

    Iteration j is queued when training on iteration ``j - max_staleness`` begins, after its weights were synced, so no
    token is older, and at most ``max_staleness + 1`` iterations exist at a time: (version + max_staleness + 1) batches
    of samples are requested, AReaL's capacity (Fu et al., 2025, arXiv:2505.24298, section 5.1). The DataModule's
    cursor moves after an iteration was trained on, so a run that is interrupted samples anew what was queued.

    With an engine that batches continuously the requests of all these iterations are out at a time, so it is not idle
    while the longest answers of one are sampled, nor while dynamic sampling replaces its last rejected groups
    (:class:`~rlhfkit.rollout.prompt_draws.OverlappingDraws` has the order of the prompts). Iterations are still trained
    on whole and in order: the first to finish would be the short ones, and the others too old.

    A sync waits for the iterations being collected, and queued ones wait for the sync. With ``in_flight`` the engine
    swaps the weights between two tokens instead. ``timeout`` is the seconds that one iteration may take.

    Raises:
        ValueError: If an argument is out of range, or the engine cannot change its weights while it generates.
    """

    overlaps = True

    def __init__(
        self,
        collector: GroupCollector,
        max_staleness: int,
        timeout: float,
        *,
        in_flight: bool = False,
        shared_devices: bool = False,
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
        self.shared_devices = shared_devices
        self._jobs: BackgroundRollouts[CollectedGroups] = BackgroundRollouts()
        self._submitted = -1
        self._draws: OverlappingDraws | None = None  # the prompts of the jobs

    def wrap_sampling(self, source: Source) -> Source:
        """Take the place of the collector, which is asked in threads."""
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        """Queue what may be sampled from the current weights, and wait for this iteration. Called on every rank.

        The DataModule's cursor must be at this iteration's prompts.
        """
        trainer, iteration = ask.trainer, ask.iteration
        if self._submitted < iteration:
            # At the DataModule's cursor, at the start of a run or after a resume.
            self._submitted, self._draws = iteration - 1, self._draw_from_cursor(trainer, iteration)
        left = float("inf")
        if trainer.max_epochs not in (None, -1):
            left = trainer.max_epochs - trainer.current_epoch
        for number in range(self._submitted + 1, iteration + self.max_staleness + 1):
            if number - iteration < left:
                self._submit(dataclasses.replace(ask, iteration=number))
        with self.collector.timing.record("wait", iteration):
            try:
                return self._jobs.result(iteration, self.timeout)
            except WeightsNeededError:
                self._jobs.clear(self.timeout)
                self._submitted = -1  # the next call queues this iteration and the ones behind it again
                raise

    def _draw_from_cursor(self, trainer: L.Trainer, iteration: int) -> OverlappingDraws:
        """Let iterations draw prompts from the DataModule's cursor on; several at a time if the engine can run them."""
        data, place = prompts_of(trainer), prompts_of(trainer).prompt_queue().after
        return OverlappingDraws(
            lambda: data.prompt_queue(place), first=iteration, ahead=self._ahead, timeout=self.timeout
        )

    @property
    def _ahead(self) -> int:
        """Later iterations that draw their first prompts before an iteration has ended."""
        return self.max_staleness if self.collector.engine.continuous_batching else 0

    def _submit(self, ask: Ask) -> None:
        iteration = ask.iteration
        # Opened here, as all ranks must open their logs in one order; jobs may overlap.
        rank_log = self.collector.open_log(keep=self.max_staleness + 3)
        draws = self._draws
        assert draws is not None

        def job(let_next_start: Callable[[], None]) -> CollectedGroups:
            try:
                collected = self.collector.collect(
                    ask,
                    rank_log=rank_log,
                    queue=draws.queue(iteration),
                    ahead=self._ahead,
                    on_drawn=let_next_start if self.collector.engine.continuous_batching else None,
                    failure=draws.failure,  # the prompts of this job would be those of the iteration that failed
                )
            except BaseException as error:
                draws.fail(error)
                raise
            draws.finish(iteration)
            return collected

        self._submitted = iteration
        self._jobs.submit(iteration, job)

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

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if engines give their memory to training while they would sample."""
        if self.shared_devices:
            raise ValueError(
                "VLLMPool(colocate=True) gives its memory to training while the policy learns, and with "
                "max_staleness it would sample in that time: use one"
            )

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Return how old the samples are."""
        return staleness_metrics(shared.numbers, version)

    def close(self) -> None:
        """Drop what is queued; the next run draws its prompts again."""
        self._jobs.close()
        self._jobs, self._submitted, self._draws = BackgroundRollouts(), -1, None
