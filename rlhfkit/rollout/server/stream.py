"""``ServerStream``: groups of running servers, in the order in which they are finished."""

import asyncio
import concurrent.futures
import math
import queue
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rlhfkit.data.types import Prompt, Sample


class SampleOnce(Protocol):
    """Samples one completion."""

    def __call__(self, prompt: Prompt, index: int, *, iteration: int) -> Coroutine[Any, Any, Sample]:
        """Return the sample at a position of a prompt's group, with the seed of an iteration."""
        ...


Submit = Callable[[Coroutine[Any, Any, list[Sample]]], "concurrent.futures.Future[list[Sample]]"]


class ServerStream:
    """A :class:`~rlhfkit.rollout.collector.GroupStream`, for one thread at a time; several may be open at once.

    Args:
        sample: Makes one sample.
        submit: Runs a coroutine in the thread of the connections.
        check: Raises RequestError if one of some prompts cannot be sampled.
        group_size: Samples of each prompt.
        iteration: That of prompts submitted without one.
    """

    def __init__(
        self,
        sample: SampleOnce,
        submit: Submit,
        check: Callable[[Sequence[Prompt]], None],
        *,
        group_size: int,
        iteration: int,
    ) -> None:
        self._sample = sample
        self._submit = submit
        self._check = check
        self._group_size = group_size
        self._iteration = iteration
        self._running: dict[concurrent.futures.Future[list[Sample]], int] = {}  # by the number of the prompt
        self._num_prompts = 0
        self._done: queue.SimpleQueue[concurrent.futures.Future[list[Sample]]] = queue.SimpleQueue()
        self._groups: dict[int, list[Sample]] = {}

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start these groups too; RequestError, before anything is sent, if a prompt cannot be sampled."""
        self._check(prompts)
        for prompt in prompts:
            future = self._submit(self._group(prompt, self._iteration if iteration is None else iteration))
            self._running[future] = self._num_prompts
            self._num_prompts += 1
            future.add_done_callback(self._done.put)

    async def _group(self, prompt: Prompt, iteration: int) -> list[Sample]:
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(self._sample(prompt, index, iteration=iteration)) for index in range(self._group_size)
            ]
        return [task.result() for task in made]

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """Wait for groups, up to ``wait`` seconds.

        Raises:
            RequestError: If a server refuses a request.
            EngineError: If no server answers one.
        """
        deadline = math.inf if wait is None else time.monotonic() + wait
        while not self._groups and self._running:
            left = deadline - time.monotonic()
            try:
                self._take(self._done.get(timeout=None if left == math.inf else max(left, 0.0)))
            except queue.Empty:
                return []
            while not self._done.empty():
                self._take(self._done.get())
        ready = sorted(self._groups)[:most]
        return [self._groups.pop(number) for number in ready]

    def _take(self, future: "concurrent.futures.Future[list[Sample]]") -> None:
        number = self._running.pop(future)
        try:
            self._groups[number] = future.result()
        except ExceptionGroup as failures:  # of a task group; the other requests of the group were cancelled
            raise failures.exceptions[0] from None

    def close(self) -> None:
        """Cancel what is not finished; a second call does nothing."""
        for future in self._running:
            future.cancel()
        self._running, self._groups = {}, {}
