"""``CriticDesk``: the Ray actor through which training ranks and the ranks of a critic exchange messages and answers.

:mod:`rlhfkit.roles.critic_pool` has this file pickled by value, so that the actor's process imports neither torch nor
rlhfkit: only the standard library is imported here.
"""

import asyncio
from collections import Counter, deque
from typing import Any

MAX_RECORDS = 20_000
"""Finished pieces of work whose times are kept; a report shows those of the last iterations."""


class _Exchange:
    """Numbered rounds to which every writer adds a value; removed when every reader has them."""

    def __init__(self, writers: int, readers: int) -> None:
        self.writers, self.readers = writers, readers
        self.values: dict[int, dict[int, Any]] = {}  # by number of the round, and writer
        self.read = Counter[int]()

    def take(self, number: int) -> list[Any]:
        found = self.values[number]
        self.read[number] += 1
        if self.read[number] == self.readers:
            del self.values[number], self.read[number]
        return [found[writer] for writer in range(self.writers)]


class CriticDesk:
    """Passes messages of all training ranks to every critic rank, and their answers to every training rank.

    Training ranks send the same kinds of messages in the same order and number them, as Ray may run the calls of an
    asynchronous actor in any order.

    Args:
        senders: Number of training ranks.
        receivers: Number of critic ranks.
    """

    def __init__(self, senders: int, receivers: int) -> None:
        self._messages, self._answers = _Exchange(senders, receivers), _Exchange(receivers, senders)
        self._finished = 0
        self._work: deque[tuple[int, str, float, float]] = deque(maxlen=MAX_RECORDS)
        self._failure: str | None = None
        self._changed = asyncio.Condition()

    async def post(self, sender: int, number: int, *message: Any) -> None:
        """Take a message of a training rank."""
        await self._put(self._messages, number, sender, message)

    async def messages(self, number: int) -> tuple[str, Any]:
        """The messages of a number, by training rank, for a critic rank; waits for them."""
        return await self._take(self._messages, number)

    async def answer(self, receiver: int, number: int, value: Any) -> None:
        """Take what a critic rank answers to the messages of a number."""
        self._finished += 1
        await self._put(self._answers, number, receiver, value)

    async def answers(self, number: int) -> tuple[str, Any]:
        """The answers to the messages of a number, by critic rank, for a training rank; waits for them."""
        return await self._take(self._answers, number)

    async def worked(self, receiver: int, phase: str, start: float, end: float) -> None:
        """A critic rank has finished a micro-batch, or the values of an iteration, in these seconds of its clock."""
        self._finished += 1
        self._work.append((receiver, phase, start, end))

    async def work(self) -> list[tuple[int, str, float, float]]:
        """What critic ranks have finished last: rank, phase, start and end."""
        return list(self._work)

    async def finished(self) -> int:
        """How many answers and micro-batches the critic ranks have finished: grows while they work."""
        return self._finished

    async def fail(self, message: str) -> None:
        """Tell everybody who waits, or ever will, that the critic's ranks have failed; the first message is kept."""
        async with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    async def _put(self, exchange: _Exchange, number: int, writer: int, value: Any) -> None:
        async with self._changed:
            exchange.values.setdefault(number, {})[writer] = value
            self._changed.notify_all()

    async def _take(self, exchange: _Exchange, number: int) -> tuple[str, Any]:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._failure is not None or len(exchange.values.get(number, ())) == exchange.writers
            )
            return ("failed", self._failure) if self._failure is not None else ("done", exchange.take(number))
