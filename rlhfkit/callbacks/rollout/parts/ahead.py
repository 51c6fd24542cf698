"""``Ahead``: while the trainer learns from one iteration, a thread collects the next ones."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart, Rollouts
from rlhfkit.callbacks.rollout.sharing import SharedIteration, staleness_metrics
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.distributed import gather_objects
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import WeightsNeededError
from rlhfkit.rollout.prompt_stream import PromptStream
from rlhfkit.trainer_parts import prompts_of
from rlhfkit.validation import check_integer

T = TypeVar("T")

_END_SECONDS = 60.0
"""Time for what is being sampled to end, when a run does."""


class Ahead(RolloutPart):
    """While the trainer learns from iteration i, a thread collects up to iteration i + ``max_staleness``.

    Iteration j is queued when training on iteration ``j - max_staleness`` begins, after its weights were synced, so no
    token is older, and at most ``max_staleness + 1`` iterations exist at a time: (version + max_staleness + 1) batches
    of samples are requested, AReaL's capacity (Fu et al., 2025, arXiv:2505.24298, section 5.1). The DataModule's
    cursor moves after an iteration was trained on, so a run that is interrupted samples anew what was queued.

    With an engine that batches continuously the groups of all queued iterations are in flight at a time
    (:class:`~rlhfkit.rollout.prompt_stream.PromptStream`), so it is not idle while the longest answers of one are
    sampled, and the group that takes the place of a rejected one has begun already. Not so with oversampling, which
    leaves no longest answers to wait for, nor with an order of prompts that goes by rewards. Iterations are still
    trained on whole and in order: the first to finish would be the short ones, and the others too old.

    Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[Correction("tis")])
        RolloutCallback(math_match, engine=VLLMPool(num_engines=2), parts=[Ahead(1, in_flight=True)])

    Args:
        max_staleness: Iterations by which sampling may be ahead of learning, so that samples may be that many
            iterations old; give the module a ``correction`` for it.
        in_flight: Sync weights while the engine generates: it swaps them between two tokens, and each token records its
            version. Otherwise a sync waits for the iterations being collected, and queued ones wait for the sync.

    Raises:
        ValueError: If ``max_staleness`` is below 1, or, when a ``RolloutCallback`` takes it, if the engine cannot
            change its weights while it generates.
    """

    overlaps = True

    def __init__(self, max_staleness: int = 1, *, in_flight: bool = False) -> None:
        check_integer("max_staleness", max_staleness, minimum=1, why="without Ahead sampling and learning take turns")
        self.max_staleness = self.staleness = max_staleness
        self.in_flight = in_flight
        self._jobs = Jobs[CollectedGroups]()
        self._submitted = -1
        self._place: dict[str, Any] = {}  # where the next job's prompts begin
        self._prompts: PromptStream | None = None  # groups of later jobs, if they may be in flight
        self._positions: dict[int, int] = {}  # of the first prompt of iterations among all of the run
        self._sampling: SamplingSpec | None = None  # of the iterations since it began
        self._failure: BaseException | None = None  # of a job; later ones would have other prompts without it

    def attach(self, rollouts: Rollouts) -> None:
        super().attach(rollouts)
        self.collector, self.timeout = rollouts.collector, rollouts.rollout_timeout
        engine = self.collector.engine
        if self.in_flight and not engine.updates_in_flight:
            raise ValueError(
                f"in_flight=True changes the weights while the engine generates, and {type(engine).__name__} does not "
                "say that it can (updates_in_flight): use LocalEngine or VLLMPool, or in_flight=False"
            )

    def why_copied(self, trainer: L.Trainer) -> str | None:
        return "the engine generates while they are trained (Ahead)"

    def wrap_sampling(self, source: Source) -> Source:
        """Take the place of the collector, which is asked in a thread."""
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        """Queue what may be sampled from the current weights, and wait for this iteration. Called on every rank.

        The DataModule's cursor must be at this iteration's prompts.
        """
        trainer, iteration = ask.trainer, ask.iteration
        if self._submitted < iteration:
            self._begin(ask)
        if ask.sampling != self._sampling:
            raise ValueError(
                "Ahead samples several iterations at once, all in one way, and a part asks for another SamplingSpec in "
                f"iteration {iteration}: leave one of the two out"
            )
        last = iteration + self.max_staleness
        if trainer.max_epochs not in (None, -1):
            last = min(last, iteration + trainer.max_epochs - trainer.current_epoch - 1)
        for number in range(self._submitted + 1, last + 1):
            self._submit(dataclasses.replace(ask, iteration=number))
        with self.collector.timing.record("wait", iteration):
            try:
                return self._jobs.result(iteration, self.timeout)
            except WeightsNeededError:
                self._jobs.clear(self.timeout)
                self._submitted = -1  # the next call queues this iteration and the ones behind it again
                raise

    def _begin(self, ask: Ask) -> None:
        """Begin at the DataModule's cursor, at the start of a run or after a resume."""
        trainer, iteration = ask.trainer, ask.iteration
        data = prompts_of(trainer)
        self._submitted, self._failure, self._sampling = iteration - 1, None, ask.sampling
        self._place = data.prompt_queue().after
        self._prompts = None
        if self.collector.starts_ahead(trainer):
            self._prompts = PromptStream(
                data.prompt_queue,
                wanted=ask.wanted,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                position=self._positions.get(iteration, iteration * ask.wanted),
            )

    def _submit(self, ask: Ask) -> None:
        iteration, prompts = ask.iteration, self._prompts
        # Opened here, as all ranks must open their logs in one order.
        rank_log = self.collector.open_log(keep=self.max_staleness + 3)

        def job() -> CollectedGroups:
            if self._failure is not None:
                raise self._failure
            try:
                queue = prompts_of(ask.trainer).prompt_queue(self._place)
                collected = self.collector.collect(ask, rank_log=rank_log, queue=queue, prompts=prompts)
            except BaseException as error:
                self._failure = error
                if prompts is not None:
                    prompts.drop()
                raise
            self._place = collected.after
            if prompts is not None:
                self._positions[iteration + 1] = prompts.position
            return collected

        self._submitted = iteration
        self._jobs.submit(iteration, job)
        if prompts is not None:
            prompts.newest = iteration

    def updating_weights(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """A context inside which the engine may be given new weights. A collective."""
        return nullcontext() if self.in_flight else self.paused(trainer)

    @contextmanager
    def paused(self, trainer: L.Trainer) -> Iterator[None]:
        """Wait for what is being sampled and hold what is queued inside the context. A collective.

        Ranks whose threads collect together stop at the newest iteration of which any has started a group.
        """

        def newest_of_all(mine: int) -> int:
            return max(gather_objects(mine if self._prompts is None else self._submitted))

        with self._jobs.paused(self.timeout, agree=newest_of_all):
            yield

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        return staleness_metrics(shared.numbers, version)

    def end_iteration(self, next_iteration: int) -> None:
        self._positions = {number: each for number, each in self._positions.items() if number >= next_iteration}

    def state_dict(self, next_iteration: int) -> list[int]:
        """How many prompts the run has drawn before ``next_iteration``, which goes into the seeds of what follows."""
        return [next_iteration, self._positions[next_iteration]] if next_iteration in self._positions else []

    def load_state_dict(self, own: Iterable[int], states: Iterable[int], *, rank: int, world_size: int) -> None:
        numbers = [*own]
        self._positions = {numbers[0]: numbers[1]} if numbers else {}

    def clear(self) -> None:
        self._positions = {}

    def close(self) -> None:
        """Drop what is queued; the next run draws its prompts again."""
        with suppress(TimeoutError):
            self._jobs.clear(_END_SECONDS)
        if self._prompts is not None:
            self._prompts.drop()
        self._jobs, self._submitted, self._prompts = Jobs(), -1, None


class Jobs(Generic[T]):
    """Numbered jobs beside the caller, one after another, each in a thread; one thread calls the methods."""

    def __init__(self) -> None:
        self.pending: dict[int, Future[T]] = {}
        """Those whose results were not collected, by number, in the order of submission."""
        self._changed = threading.Condition()
        self._started = -1  # the newest job that has started
        self._limit = math.inf  # jobs beyond it do not start

    def __reduce__(self) -> Any:
        """Pickle without jobs, for ranks in other processes (on Ray)."""
        return type(self), ()

    def submit(self, number: int, job: Callable[[], T]) -> None:
        """Start a job behind those before it."""
        before, future = list(self.pending.values()), Future[T]()

        def work() -> None:
            wait(before)
            with self._changed:
                self._changed.wait_for(lambda: number <= self._limit or future.cancelled())
                if not future.set_running_or_notify_cancel():
                    return
                self._started = number
            try:
                future.set_result(job())
            except BaseException as error:  # raised again by result()
                future.set_exception(error)

        self.pending[number] = future
        threading.Thread(target=work, name="rollouts", daemon=True).start()

    def result(self, number: int, timeout: float) -> T:
        """Wait up to ``timeout`` seconds for a job, return its result, and forget it; raises what the job raised.

        Raises:
            TimeoutError: If it takes longer; the message says whether it was running.
        """
        future = self.pending[number]
        if not wait([future], timeout).done:
            state = "still running" if future.running() else "waiting behind others"
            raise TimeoutError(f"the rollouts of iteration {number} took longer than {timeout:g} s: {state}")
        del self.pending[number]
        return future.result()

    @contextmanager
    def paused(self, timeout: float, agree: Callable[[int], int] = int) -> Iterator[None]:
        """Wait for the running job, and start no other inside; TimeoutError if it takes more than ``timeout`` seconds.

        ``agree`` maps the number of the newest started job (-1: none) to that of the last job to run before the pause.
        Processes whose jobs work together agree on the highest number.
        """
        with self._changed:
            outside, self._limit = self._limit, self._started
        try:
            last = max(agree(self._started), self._started)
            self._move_limit(last)
            running = {number: job for number, job in self.pending.items() if number <= last}
            _wait_for(running, timeout, ", so that the engine could not be given new weights")
            yield
        finally:
            self._move_limit(outside)

    def clear(self, timeout: float) -> None:
        """Forget all jobs, and wait for the running one; TimeoutError after ``timeout`` seconds."""
        jobs, self.pending = self.pending, {}
        for job in jobs.values():
            job.cancel()
        self._move_limit(math.inf)
        _wait_for(jobs, timeout)

    def _move_limit(self, limit: float) -> None:
        with self._changed:
            self._limit = limit
            self._changed.notify_all()


def _wait_for(jobs: Mapping[int, "Future[Any]"], timeout: float, why: str = "") -> None:
    late = wait(jobs.values(), timeout).not_done
    if late:
        first = next(number for number, job in jobs.items() if job in late)
        raise TimeoutError(f"the rollouts of iteration {first} did not end within {timeout:g} s{why}")
