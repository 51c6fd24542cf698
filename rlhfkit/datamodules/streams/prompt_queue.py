"""The prompts of a stream by their number, and how an iteration draws them.

A cursor holds the number of the next prompt and the position in front of it, and the same of prompts that were drawn
and not used: after a resume they are found again by reading from there.
"""

import dataclasses
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.streams.rows import Position

Place = tuple[int, Position | None]
"""Number of a prompt in the stream, from 0, and the position in front of it; ``None``: the beginning."""


class StreamCursor(NamedTuple):
    """Where the next prompt of a stream is drawn."""

    next: Place = (0, None)
    """The first prompt that was never drawn."""
    postponed: tuple[Place, ...] = ()
    """Prompts that were drawn and not used, which come first."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, for a checkpoint."""
        return {"next": list(self.next), "postponed": [list(place) for place in self.postponed]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`; ignores other entries of ``state``."""
        number, position = state["next"]
        return cls((number, position), tuple((number, position) for number, position in state["postponed"]))


class PromptStream:
    """Reads a stream of prompts forward, and keeps those that may be drawn again. Safe to use from several threads.

    Args:
        open_stream: Yields (position behind it, prompt) from a position on.
        fingerprint: Digest of what positions depend on.
    """

    def __init__(
        self, open_stream: Callable[[Position | None], Iterator[tuple[Position, Prompt]]], fingerprint: str
    ) -> None:
        self.fingerprint = fingerprint
        self._open_stream = open_stream
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Prompt, Position]] = {}  # by number, with the position behind it
        self._stream: Iterator[tuple[Position, Prompt]] | None = None
        self._number = 0  # of the next prompt of ``_stream``

    def read(self, place: Place) -> tuple[Prompt, Place]:
        """Return a copy of a prompt, whose ``index`` is its number, and the place behind it."""
        number, start = place
        with self._lock:
            if number not in self._kept:
                if self._stream is None or self._number > number:
                    self._stream, self._number = self._open_stream(start), number
                while self._number <= number:  # also over prompts between two that were postponed
                    position, prompt = next(self._stream)
                    self._number += 1
                self._kept[number] = prompt, position
            prompt, behind = self._kept[number]
        return dataclasses.replace(prompt, index=number, metadata=dict(prompt.metadata)), (number + 1, behind)

    def forget(self, cursor: StreamCursor) -> None:
        """Free the prompts that nobody draws again when iterations begin at this cursor."""
        needed = {number for number, _ in cursor.postponed}
        with self._lock:
            self._kept = {
                number: kept for number, kept in self._kept.items() if number >= cursor.next[0] or number in needed
            }

    def restart(self) -> None:
        """Read again what was read, because rows become other prompts now."""
        with self._lock:
            self._kept, self._stream = {}, None


class StreamQueue:
    """The queue of prompts of one iteration: none is drawn twice, and those that were not used can be requeued."""

    def __init__(self, stream: PromptStream, cursor: StreamCursor) -> None:
        self.cursor = cursor
        """Where the next prompt is drawn."""
        self._stream = stream
        self._drawn: dict[int, Place] = {}  # by number, in the order of drawing

    @property
    def remaining(self) -> int:
        """A stream has no end."""
        return sys.maxsize

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts."""
        prompts = []
        waiting = [place for place in self.cursor.postponed if place[0] not in self._drawn]
        taken, beyond = waiting[:count], self.cursor.next
        for place in taken:
            prompts.append(self._stream.read(place)[0])
        while len(prompts) < count:
            taken.append(beyond)
            prompt, beyond = self._stream.read(beyond)
            prompts.append(prompt)
        self._drawn |= {place[0]: place for place in taken}
        used = {number for number, _ in taken}
        self.cursor = StreamCursor(beyond, tuple(place for place in self.cursor.postponed if place[0] not in used))
        return prompts

    def requeue(self, prompts: Sequence[Prompt]) -> None:
        """Put drawn prompts at the front of the next iteration, in the order of drawing."""
        self.cursor = self._in_front({prompt.index for prompt in prompts}, self.cursor)

    def in_front_of(self, cursor: StreamCursor) -> StreamCursor:
        """The cursor with all drawn prompts in front of it, in the order of drawing."""
        return self._in_front(self._drawn, cursor)

    def _in_front(self, numbers: Collection[int], cursor: StreamCursor) -> StreamCursor:
        places: Iterable[Place] = (place for number, place in self._drawn.items() if number in numbers)
        return cursor._replace(postponed=(*places, *cursor.postponed))

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Do nothing: there is no curriculum."""

    @property
    def after(self) -> dict[str, Any]:
        """Cursor after this iteration and the fingerprint, as plain values."""
        return {**self.cursor.state_dict(), "fingerprint": self._stream.fingerprint}
