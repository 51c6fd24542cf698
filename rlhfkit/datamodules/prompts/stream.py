"""``StreamedPrompts``: prompts that are read when they are drawn, by their number in the stream.

A cursor holds the number of the next prompt and the position in front of it, and the same of prompts that were drawn
and not used: after a resume they are found again by reading from there.
"""

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.cursor import TrainingPrompts
from rlhfkit.datamodules.prompts.rows import PromptColumns, source_names
from rlhfkit.datamodules.streaming import MixedStream, Position, SourceStream
from rlhfkit.datamodules.tokenization.mixture import Mixture, list_sources
from rlhfkit.datamodules.tokenization.sources import PlacedRow, check_columns

log = logging.getLogger(__name__)

Place = tuple[int, Position | None]
"""Number of a prompt in the stream, from 0, and the position in front of it; ``None``: the beginning."""


class StreamCursor(NamedTuple):
    """Where the next prompt of a stream is drawn."""

    next: Place = (0, None)
    """The first prompt that was never drawn."""
    postponed: tuple[Place, ...] = ()
    """Prompts that were drawn and not used, which come first."""

    def new_pass(self) -> Self:
        """The beginning of the data."""
        return type(self)((self.next[0], None))

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, for a checkpoint."""
        return {"next": list(self.next), "postponed": [list(place) for place in self.postponed]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`; ignores other entries of ``state``."""
        number, position = state["next"]
        return cls((number, position), tuple((number, position) for number, position in state["postponed"]))


class StreamedPrompts(TrainingPrompts):
    """Training prompts that are read and tokenised when they are drawn, and the cursor.

    The prompts of iterations that were not trained on are in memory, and one block of each source. The ``index`` of a
    prompt is its number in the stream, not its row, and goes on in the next pass, so an iteration in which a pass ends
    may have a row twice. All ranks draw the same prompts.

    Args:
        data: The source, or a mixture of sources.
        columns: Make rows into prompts.
        open_source: Opens the stream of a source, given what makes prompts of its rows and which columns they need.
        description: Of the data, for messages.
        max_length: Tokens that a prompt may have; ``None``: unlimited.
        overlong: ``"error"`` or ``"drop"`` for longer ones.
    """

    CHUNK = 100
    """Rows that are tokenised together, ahead of those that are drawn."""

    def __init__(
        self,
        data: Any,
        columns: PromptColumns,
        open_source: Callable[..., SourceStream[Prompt]],
        *,
        description: str,
        max_length: int | None,
        overlong: Literal["error", "drop"],
    ) -> None:
        super().__init__(StreamCursor(), description)
        self.data = data
        self.columns = columns
        self.overlong = overlong
        self._limits = [] if max_length is None else [(max_length, f"max_prompt_length {max_length}")]
        self._vocabulary: int | None = None
        sources = list_sources(data)
        names = source_names(sources) if isinstance(data, Mixture) else [None]
        opened = [self._open(source, name, open_source) for source, name in zip(sources, names, strict=True)]
        self.stream = MixedStream(data, opened)
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Prompt, Position]] = {}  # by number, with the position behind it
        self._opened: Iterator[tuple[Position, Prompt]] | None = None
        self._number = 0  # of the next prompt of ``_opened``

    def _open(
        self, source: Any, name: str | None, open_source: Callable[..., SourceStream[Prompt]]
    ) -> SourceStream[Prompt]:
        columns = self.columns

        def make(rows: Sequence[PlacedRow]) -> Iterator[list[Prompt]]:
            return self._make_prompts(rows, name, stream.reader.name)

        stream = open_source(source, make, (columns.prompt, columns.answer), "a prompt that is short enough")
        check_columns(stream.reader.head, source, prompt=columns.prompt, answer=columns.answer)
        columns.text(stream.reader.head[0], f"{stream.reader.name}, row 0,")
        return stream

    def _make_prompts(self, rows: Sequence[PlacedRow], name: str | None, source: str) -> Iterator[list[Prompt]]:
        """Yield the prompt of each row, or none for one that is dropped."""
        columns, dropped = self.columns, 0
        for start in range(0, len(rows), self.CHUNK):
            chunk = rows[start : start + self.CHUNK]
            for (where, row), (text, token_ids) in zip(chunk, columns.read(chunk), strict=True):
                columns.check_token(max(token_ids), self._vocabulary, where)
                if not self._fits(len(token_ids), where):
                    dropped += 1
                    yield []
                    continue
                prompt = columns.make(row, 0, text, token_ids, where)
                if name is not None:
                    prompt.metadata.setdefault("source", name)
                yield [prompt]
        if dropped:
            log.warning("%s: %d of %d prompts are too long and are dropped", source, dropped, len(rows))

    def _fits(self, length: int, where: str) -> bool:
        limit, reason = min(self._limits, default=(length, ""))
        if length > limit and self.overlong == "error":
            raise ValueError(
                f"the prompt of {where} has {length} tokens, more than {limit} ({reason}): raise the limit, shorten "
                "it, or drop such prompts with overlong_prompts='drop'"
            )
        return length <= limit

    def check(self, *, longest: int, reason: str, vocabulary: int | None) -> None:
        """Check prompts when they are read: their length, and that the model knows their tokens."""
        self._limits, self._vocabulary = [*self._limits, (longest, reason)], vocabulary
        with self._lock:  # what was read before is read again
            self._kept, self._opened = {}, None

    def source_columns(self) -> list[tuple[Any, list[str]]]:
        """Each source, with the columns of its first row."""
        named = ["source"] if isinstance(self.data, Mixture) else []
        heads = [stream.reader.head for stream in self.stream.sources]
        return [(one, [*head.column_names, *named]) for one, head in zip(list_sources(self.data), heads, strict=True)]

    def describe(self, text: str) -> str:
        """``text``, the names of sources and columns, as a description of these prompts."""
        return f"a stream of {text}"

    @property
    def total(self) -> int:
        """A stream has no end."""
        return sys.maxsize

    def take(
        self, count: int, cursor: StreamCursor, *, without: Collection[Place] = ()
    ) -> tuple[list[Place], StreamCursor]:
        """The places of the next ``count`` prompts, none of them in ``without``, and the cursor after them."""
        drawn = {number for number, _ in without}
        places, beyond = [place for place in cursor.postponed if place[0] not in drawn][:count], cursor.next
        used = {number for number, _ in places}
        while len(places) < count:
            places.append(beyond)
            _, behind = self._read(beyond)
            beyond = beyond[0] + 1, behind
        return places, StreamCursor(beyond, tuple(place for place in cursor.postponed if place[0] not in used))

    def prompt(self, place: Place) -> Prompt:
        """A copy of the prompt at a place, whose ``index`` is its number."""
        prompt, _ = self._read(place)
        return dataclasses.replace(prompt, index=place[0], metadata=dict(prompt.metadata))

    def _read(self, place: Place) -> tuple[Prompt, Position]:
        """The prompt at a place and the position behind it; reads forward, and keeps what may be drawn again."""
        number, start = place
        with self._lock:
            if number not in self._kept:
                if self._opened is None or self._number > number:
                    self._opened, self._number = self.stream.open(start), number
                while self._number <= number:  # also over prompts between two that were postponed
                    position, prompt = next(self._opened)
                    self._number += 1
                self._kept[number] = prompt, position
            return self._kept[number]

    @property
    def fingerprint(self) -> str:
        """Digest of what places depend on."""
        return self.stream.fingerprint

    def changes(self) -> str:
        """What another fingerprint may come from."""
        return "other rows, weights, seed or shuffle_buffer_size"

    def set_cursor(self, after: Mapping[str, Any]) -> None:
        """Move the cursor to the end of a trained iteration, unless the data differs, and free its prompts."""
        super().set_cursor(after)
        cursor: StreamCursor = self.cursor
        needed = {number for number, _ in cursor.postponed}
        with self._lock:
            self._kept = {
                number: kept for number, kept in self._kept.items() if number >= cursor.next[0] or number in needed
            }

    @property
    def untrained(self) -> Position | None:
        """The position in front of the first prompt that was not trained on; ``None``: the beginning."""
        cursor: StreamCursor = self.cursor
        return min((cursor.next, *cursor.postponed), key=lambda place: place[0])[1]
