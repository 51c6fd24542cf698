"""JSON of strangers: how deep it may be nested, and what its texts may hold, before anything of ours works on it."""

import json
from collections.abc import Mapping
from typing import Any

MAX_NESTING = 64
"""Levels of lists and objects inside one another. Python gives up at about 1000, chat templates and JSON before."""


def check_json(value: Any) -> None:
    """Raise if a value cannot be passed on safely.

    Args:
        value: As JSON gives it.

    Raises:
        ValueError: If it has more than ``MAX_NESTING`` levels, or a text with half of a UTF-16 surrogate pair, which
            JSON can write and neither tokenizers nor UTF-8 can.
    """
    values, level = [value], 0
    while values:
        if level > MAX_NESTING:
            raise ValueError(_TOO_DEEP)
        level += 1
        inside: list[Any] = []
        for one in values:
            if isinstance(one, str):
                _check_text(one)
            elif isinstance(one, Mapping):
                inside += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                inside += one
        values = inside


_TOO_DEEP = f"lists and objects may be nested {MAX_NESTING} levels deep, not more"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text must be Unicode; character {error.start} is half of a surrogate pair") from None


def parse_json(text: str) -> Any:
    """Read JSON that somebody else has written, a model for one.

    Args:
        text: The JSON.

    Raises:
        ValueError: If it is none, or :func:`check_json` refuses it.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_json(value)
    return value
