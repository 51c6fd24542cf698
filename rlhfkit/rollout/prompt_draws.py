"""``OverlappingDraws``: prompts of iterations that are sampled side by side, in an order that no timing changes."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.protocols import PromptQueue


class OverlappingDraws:
    """Gives each iteration a queue of prompts, while up to ``ahead`` later iterations are sampled beside it.

    Which prompts an iteration draws in place of rejected ones, and which it requeues, is known late, and must not
    depend on how far the later iterations are. So prompts are always drawn in this order, on every rank and after a
    resume: the first prompts of iterations 0 to ``ahead``; all further ones of iteration 0, and what it requeues; the
    first prompts of iteration ``ahead`` + 1; all further ones of iteration 1; and so on. A draw whose turn has not come
    waits; with ``ahead=0`` iterations draw one after another.

    Args:
        open_queue: Opens a queue of one iteration's prompts at the place where the first iteration begins.
        first: Number of the first iteration.
        ahead: Later iterations that may draw their first prompts before an iteration has ended.
        timeout: Seconds that a draw may wait for its turn.
    """

    def __init__(self, open_queue: Callable[[], PromptQueue], *, first: int, ahead: int, timeout: float) -> None:
        self.failure: BaseException | None = None
        """Why an iteration failed; the prompts of later ones would be other ones without it."""
        self._open_queue = open_queue
        self._ahead = ahead
        self._timeout = timeout
        self._changed = threading.Condition()
        self._oldest = first  # the iteration that may draw further prompts
        self._next = first  # the first iteration whose first prompts were not drawn
        queue = open_queue()
        self._cursor = queue.cursor
        self.remaining = queue.remaining
        """Different prompts that an iteration can draw."""
        self._count = 0  # first prompts of an iteration
        self._queues: dict[int, PromptQueue] = {}
        self._first: dict[int, list[Prompt]] = {}  # drawn, not asked for yet

    def queue(self, iteration: int) -> "IterationDraws":
        """Return the queue of an iteration."""
        return IterationDraws(self, iteration)

    def finish(self, iteration: int) -> None:
        """The iteration has ended; it is the next one's turn."""
        with self._changed:
            del self._queues[iteration]
            self._oldest = iteration + 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise the error in all draws, as they may depend on the iteration that failed."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def first_prompts(self, iteration: int, count: int) -> list[Prompt]:
        """Return an iteration's first ``count`` prompts, equally many for all iterations."""
        with self._changed:
            self._wait_until(iteration, lambda: iteration <= self._oldest + self._ahead)
            self._count = self._count or count
            self._draw_first(iteration)
            return self._first.pop(iteration)

    @contextmanager
    def turn(self, iteration: int) -> Iterator[PromptQueue]:
        """Wait until all earlier iterations have ended; yields the iteration's queue, at the common place."""
        with self._changed:
            self._wait_until(iteration, lambda: iteration == self._oldest)
            self._draw_first(iteration + self._ahead)
            queue = self._queues[iteration]
            queue.cursor = self._cursor
            yield queue
            self._cursor = queue.cursor

    def after(self, iteration: int) -> dict[str, Any]:
        """Where a run begins that is resumed behind this iteration: the later iterations draw their prompts again."""
        with self.turn(iteration) as queue:
            place = queue.cursor
            for later in sorted(self._queues, reverse=True):
                if later > iteration:
                    queue.cursor = self._queues[later].with_requeued(queue.cursor)
            after = queue.after
            queue.cursor = place
            return after

    def _draw_first(self, last: int) -> None:
        for iteration in range(self._next, last + 1):
            queue = self._open_queue()
            queue.cursor = self._cursor
            self._first[iteration] = queue.take(self._count)
            self._queues[iteration], self._cursor, self._next = queue, queue.cursor, iteration + 1

    def _wait_until(self, iteration: int, ready: Callable[[], bool]) -> None:
        in_time = self._changed.wait_for(lambda: ready() or self.failure is not None, self._timeout)
        if self.failure is not None:
            raise self.failure
        if not in_time:
            raise TimeoutError(
                f"iteration {iteration} has waited {self._timeout:g} s to draw prompts, until iteration "
                f"{self._oldest} has all of its samples"
            )


class IterationDraws:
    """The :class:`~rlhfkit.rollout.collector.DrawnPrompts` of one iteration among several."""

    def __init__(self, draws: OverlappingDraws, iteration: int) -> None:
        self._draws = draws
        self._iteration = iteration
        self._begun = False
        self._remaining = draws.remaining

    @property
    def remaining(self) -> int:
        """Different prompts that can still be drawn."""
        return self._remaining

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts; all but the first wait until earlier iterations have ended."""
        if not self._begun:
            prompts = self._draws.first_prompts(self._iteration, count)
        else:
            with self._draws.turn(self._iteration) as queue:
                prompts = queue.take(count)
        self._begun = True
        self._remaining -= len(prompts)
        return prompts

    def requeue(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts at the front of the next iteration that draws its first ones."""
        with self._draws.turn(self._iteration) as queue:
            queue.requeue(prompts)

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Remember the rewards of groups, by the index of their prompt, for a curriculum."""
        with self._draws.turn(self._iteration) as queue:
            queue.record(rewards)

    @property
    def after(self) -> dict[str, Any]:
        """Where a run begins that is resumed behind this iteration."""
        return self._draws.after(self._iteration)
