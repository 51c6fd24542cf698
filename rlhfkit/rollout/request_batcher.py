"""``RequestBatcher``: collect the requests of coroutines into calls of one engine."""

import asyncio
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.errors import RequestError
from rlhfkit.rollout.event_loop import run_in_thread
from rlhfkit.validation import check_integer, check_number

MAX_WAIT = 0.05
"""Seconds that a call of an engine in this process waits for further requests."""

PARALLEL_CALLS = 128
"""Default number of concurrent calls of a shared engine."""


class EngineFailedError(RuntimeError):
    """The engine failed, not who asked it; the cause is the engine's exception."""


@dataclass(slots=True)
class _Request:
    prompt: Prompt
    sampling: SamplingSpec
    iteration: int
    answer: asyncio.Future[list[Sample]]


def request_index(prompt_index: int, *path: int | str) -> int:
    """Return a 63-bit hash that takes the place of a prompt's index in the seeds of a request.

    ``path`` tells the requests for one prompt apart: index in the group and turn of an episode, say.
    """
    text = "/".join(map(str, (prompt_index, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Requesters:
    """Number of coroutines that are about to send requests, for which a call may wait."""

    def __init__(self) -> None:
        self.count = 0
        self.batchers: list[RequestBatcher] = []

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Context of a coroutine that will send requests, one at a time."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            for batcher in self.batchers:
                batcher.dispatch_soon()


class RequestBatcher:
    """Collects requests, in one event loop.

    An engine in this process gets one call at a time, which starts when every requester has a request waiting, or the
    first has waited ``max_wait`` seconds (``None``: 0.05 with one call at a time, else 0). A shared engine gets up to
    ``parallel_calls`` concurrent calls (``None``: 128; 1 for an engine in this process), each with an equal part of the
    waiting requests, so that nobody waits for another's slow request; its ``generate`` must be thread-safe.

    ``requesters`` may be shared by the batchers of several engines that the same coroutines ask.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        parallel_calls: int | None = None,
        max_wait: float | None = None,
        requesters: Requesters | None = None,
    ) -> None:
        check_integer("parallel_calls", parallel_calls, minimum=1, optional=True)
        check_number("max_wait", max_wait, minimum=0, optional=True, why="it is in seconds")
        self.engine = engine
        self.parallel_calls = parallel_calls or (PARALLEL_CALLS if engine.shared else 1)
        self.max_wait = max_wait if max_wait is not None else MAX_WAIT * (self.parallel_calls == 1)
        self.requesters = requesters or Requesters()
        self.requesters.batchers.append(self)
        self._calls = 0
        self._waiting: list[_Request] = []
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, prompt: Prompt, sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample ``group_size`` completions; the prompt's index (:func:`request_index`) goes into their seeds.

        Raises :class:`RequestError` if the engine refuses this request only, :class:`EngineFailedError` for its other
        errors.
        """
        answer: asyncio.Future[list[Sample]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(prompt, sampling, iteration, answer))
        self.dispatch_soon()
        return await answer

    def dispatch_soon(self) -> None:
        """Look for calls to start after the coroutines that are ready now, to see their requests too."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self, patient: bool = True) -> None:
        """Start as many calls as possible, unless it is better to wait for more requests."""
        self._soon = False
        if not self._waiting or self._calls >= self.parallel_calls:
            return
        if patient and self.max_wait and len(self._waiting) < self.requesters.count:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self.max_wait, self._time_is_up)
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [request for request in self._waiting if not request.answer.done()]  # others were cancelled
        while self._waiting and self._calls < self.parallel_calls:
            self._start(math.ceil(len(self._waiting) / (self.parallel_calls - self._calls)))

    def _time_is_up(self) -> None:
        self._timer = None
        self._dispatch(patient=False)

    def _start(self, share: int) -> None:
        """Start a call with up to ``share`` requests that have the same sampling parameters."""
        kind = (self._waiting[0].sampling, self._waiting[0].iteration)
        alike = [request for request in self._waiting if (request.sampling, request.iteration) == kind][:share]
        chosen = set(map(id, alike))
        self._waiting = [request for request in self._waiting if id(request) not in chosen]
        self._calls += 1
        task = asyncio.get_running_loop().create_task(self._call(alike))
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    async def _call(self, requests: list[_Request]) -> None:
        try:
            await self._answer(requests)
        finally:
            self._calls -= 1
            self.dispatch_soon()

    async def _answer(self, requests: list[_Request]) -> None:
        """Answer requests with one call of the engine."""
        prompts = [request.prompt for request in requests]
        sampling, iteration = requests[0].sampling, requests[0].iteration
        try:
            samples = await run_in_thread(lambda: self.engine.generate(prompts, sampling, iteration=iteration))
            size = sampling.group_size
            if len(samples) != len(requests) * size:
                raise RuntimeError(
                    f"the engine was asked for {len(requests)} x {size} samples and returned {len(samples)}"
                )
        except RequestError as error:
            if len(requests) == 1:
                _fail(requests, error)
                return
            for request in requests:  # retry one by one to find the one at fault
                if not request.answer.done():
                    await self._answer([request])
        except Exception as error:
            failure = EngineFailedError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            _fail(requests, failure)
        else:
            for place, request in enumerate(requests):
                if not request.answer.done():
                    request.answer.set_result(samples[place * size : (place + 1) * size])


def _fail(requests: list[_Request], error: Exception) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)
