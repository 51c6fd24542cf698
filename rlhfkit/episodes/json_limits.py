"""Limits on JSON from clients and models: depth of nesting, and characters that UTF-8 cannot encode."""

import json
from collections.abc import Mapping
from typing import Any

MAX_NESTING = 64
"""Maximum nesting of lists and objects. Python fails at about 1000, chat templates and JSON parsers earlier."""


def check_json(value: Any) -> None:
    """Raise ``ValueError`` above ``MAX_NESTING`` levels, or for half a surrogate pair, which UTF-8 cannot encode."""
    values, level = [value], 0
    while values:
        if level > MAX_NESTING:
            raise ValueError(_TOO_DEEP)
        level += 1
        inside: list[Any] = []
        for one in values:
            if isinstance(one, str):
                try:
                    one.encode()
                except UnicodeEncodeError as error:
                    message = f"text must be Unicode; character {error.start} is half of a surrogate pair"
                    raise ValueError(message) from None
            elif isinstance(one, Mapping):
                inside += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                inside += one
        values = inside


_TOO_DEEP = f"lists and objects may be nested {MAX_NESTING} levels deep, not more"


def parse_json(text: str) -> Any:
    """Parse JSON from a client or model; raises ``ValueError`` if it is invalid or :func:`check_json` refuses it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_json(value)
    return value
