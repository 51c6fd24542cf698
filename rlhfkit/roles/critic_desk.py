"""``CriticDesk``: the Ray actor through which training ranks and the ranks of a critic exchange requests and answers.

:mod:`rlhfkit.roles.critic_pool` has this file pickled by value, so that the actor's process imports neither torch nor
rlhfkit: only the standard library is imported here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_RECORDS = 20_000
"""Finished pieces of work whose times are kept; a report shows those of the last iterations."""


class Request(NamedTuple):
    """What all training ranks ask for together, or one micro-batch for each critic rank."""

    number: int
    """The answer is asked for by it."""
    kind: str
    parts: list[Any]
    """Of each training rank; of kind ``"batches"``: of each critic rank, ``None`` where it has no micro-batch."""
    micro_batches: int = 0
    """Of kind ``"batches"``: micro-batches of each critic rank in the optimizer step."""
    scale: float = 1.0
    """Of kind ``"batches"``: factor of the losses, more than 1 if some critic ranks have a micro-batch less."""


class CriticDesk:
    """Puts requests in one order, which is that of every training rank and in which every critic rank reads them.

    Training ranks send the same kinds of messages in the same order; the parts of all ranks are one request. Their
    micro-batches are divided among the critic ranks in the order of training, as soon as there is one for each.

    Args:
        senders: Number of training ranks.
        receivers: Number of critic ranks.
    """

    def __init__(self, senders: int, receivers: int) -> None:
        self._senders, self._receivers = senders, receivers
        self._sent: dict[int, dict[int, tuple[Any, ...]]] = {}  # message by its number in the sender's order, and rank
        self._merged = 0  # messages of all senders that have become requests
        self._requests: dict[int, Request] = {}
        self._made = 0
        self._read: dict[int, int] = {}  # by request: critic ranks that have read it
        self._window: list[Any] = []  # micro-batches of the optimizer step that no critic rank has
        self._of_window = 0  # those that have arrived
        self._answers: dict[int, dict[int, Any]] = {}  # by number of the message, and critic rank
        self._taken: dict[int, int] = {}
        self._finished = 0
        self._work: deque[tuple[int, str, float, float]] = deque(maxlen=MAX_RECORDS)
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def post(self, sender: int, number: int, kind: str, part: Any, micro_batches: int = 0) -> None:
        """Take a message of a training rank.

        ``micro_batches``, with the kind ``"batch"``: those of the rank in the optimizer step.
        """
        self._sent.setdefault(number, {})[sender] = (kind, part, micro_batches)
        while len(self._sent.get(self._merged, ())) == self._senders:
            parts = self._sent.pop(self._merged)
            self._merge([parts[rank] for rank in range(self._senders)])
            self._merged += 1
        await self._notify()

    def _merge(self, messages: list[tuple[Any, ...]]) -> None:
        kinds = {kind for kind, _, _ in messages}
        if len(kinds) > 1:
            self._failure = f"training ranks ask for different things at a time: {', '.join(sorted(kinds))}"
            return
        kind, parts = messages[0][0], [part for _, part, _ in messages]
        if kind == "batch":
            self._add_batches(parts, messages[0][2])
        else:
            self._add(Request(self._merged, kind, parts))

    def _add_batches(self, parts: list[Any], each: int) -> None:
        """Give one micro-batch to each critic rank, as often as there are enough; the last time there may be fewer."""
        self._window += parts
        self._of_window += len(parts)
        total = each * self._senders
        rounds = -(-total // self._receivers)
        last = self._of_window == total
        while len(self._window) >= self._receivers or (last and self._window):
            batches, self._window = self._window[: self._receivers], self._window[self._receivers :]
            batches += [None] * (self._receivers - len(batches))
            scale = rounds * self._receivers / total
            self._add(Request(self._merged, "batches", batches, rounds, scale))
        if last:
            self._of_window = 0

    def _add(self, request: Request) -> None:
        self._requests[self._made] = request
        self._made += 1

    async def request(self, place: int) -> tuple[str, Any]:
        """The request at a place in the order, for a critic rank; waits for it."""
        await self._until(lambda: place in self._requests)
        if self._failure is not None:
            return "failed", self._failure
        request = self._requests[place]
        self._read[place] = self._read.get(place, 0) + 1
        if self._read[place] == self._receivers:
            del self._requests[place], self._read[place]
        return "request", tuple(request)

    async def answer(self, receiver: int, number: int, value: Any) -> None:
        self._finished += 1
        self._answers.setdefault(number, {})[receiver] = value
        await self._notify()

    async def worked(self, receiver: int, phase: str, start: float, end: float) -> None:
        """A critic rank has finished a micro-batch, or the values of an iteration, in these seconds of its clock."""
        self._finished += 1
        self._work.append((receiver, phase, start, end))

    async def work(self) -> list[tuple[int, str, float, float]]:
        """What critic ranks have finished last: rank, phase, start and end."""
        return list(self._work)

    async def answers(self, number: int) -> tuple[str, Any]:
        """The answers of all critic ranks, by rank, for a training rank; waits for them."""
        await self._until(lambda: len(self._answers.get(number, ())) == self._receivers)
        if self._failure is not None:
            return "failed", self._failure
        found = [self._answers[number][rank] for rank in range(self._receivers)]
        self._taken[number] = self._taken.get(number, 0) + 1
        if self._taken[number] == self._senders:
            del self._answers[number], self._taken[number]
        return "answers", found

    async def finished(self) -> int:
        """How many answers and micro-batches the critic ranks have finished: grows while they work."""
        return self._finished

    async def fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
        await self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or condition())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
