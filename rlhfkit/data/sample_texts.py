"""Texts of samples, decoded when they are read.

A :class:`TextField` holds a text, or a :class:`TextDecoder` that makes it of the record's tokens. What is decoded is
not kept, except inside :func:`decode_together`, where the first read decodes the texts of all samples in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

Decode = Callable[[list[list[int]]], Sequence[str]]
"""Writes token ids of several sequences as texts, such as a tokenizer's ``batch_decode``; called from any thread."""


BATCH_TOKENS = 65_536
"""Tokens that are decoded in one call, about; lists of them are large, and are read under Python's lock."""


class Decoded(Protocol):
    """A record whose text is decoded."""

    @property
    def token_ids(self) -> list[int]:
        """What the text is decoded from."""
        ...


class TextDecoder:
    """Decodes the texts of records: one by one, or those of ``together`` all at once when the first is read."""

    def __init__(self, decode: Decode, together: Sequence[Decoded] = ()) -> None:
        self._decode = decode
        self._together = together
        self._kept: dict[int, str] | None = None if together else {}  # by the identity of the record
        self._lock = threading.Lock()  # a reward may read texts in several threads

    def text(self, record: Decoded) -> str:
        """Return the text of a record."""
        with self._lock:
            if self._kept is None:
                self._kept = {id(each): text for each, text in self._decoded()}
            kept = self._kept.get(id(record))
        return self._decode([record.token_ids])[0] if kept is None else kept

    def _decoded(self) -> Iterator[tuple[Decoded, str]]:
        """Decode all records, some at a time."""
        waiting: list[Decoded] = []
        token_ids: list[list[int]] = []
        count = 0
        for place, record in enumerate(self._together):
            waiting.append(record)
            token_ids.append(record.token_ids)
            count += len(token_ids[-1])
            if count >= BATCH_TOKENS or place == len(self._together) - 1:
                yield from zip(waiting, self._decode(token_ids), strict=True)
                waiting, token_ids, count = [], [], 0

    def forget(self) -> None:
        """Keep no text and no record; from now on decode one by one."""
        with self._lock:
            self._together, self._kept = (), {}


class TextField:
    """A slot of a record that holds a text or its decoder, and is read as text."""

    def __init__(self, slot: Any) -> None:
        self._read = slot.__get__
        self._write = slot.__set__

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        """Return the text; decodes it if it is not there."""
        if record is None:
            return self
        held = self._read(record)
        return held.text(record) if isinstance(held, TextDecoder) else held

    def __set__(self, record: Any, text: str | TextDecoder) -> None:
        """Set the text, or what decodes it."""
        self._write(record, text)


def decode_when_read(record: type, name: str) -> None:
    """Turn a field of a dataclass with slots into a :class:`TextField`."""
    setattr(record, name, TextField(getattr(record, name)))


@contextmanager
def decode_together(samples: Sequence[Any], decode: Decode) -> Iterator[None]:
    """Inside the block, the first ``text`` that is read decodes those of all samples, which are kept until its end.

    After the block a text is decoded anew whenever it is read, unless it was set. What is never read is not decoded.

    Args:
        samples: Whose texts to decode; the texts that they had are replaced.
        decode: Writes token ids as texts.
    """
    decoder = TextDecoder(decode, samples)
    for sample in samples:
        sample.text = decoder
    try:
        yield
    finally:
        decoder.forget()
