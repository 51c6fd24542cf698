"""Python values as plain data, exchanged between a program and its tests; parsing them executes no code.

JSON has ``None``, booleans, numbers, texts and lists. All else is an object with one key: ``{"tuple": [...]}``,
``{"set": [...]}``, ``{"frozenset": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"bytes": hexadecimal}``,
``{"complex": [real, imaginary]}``, ``{"range": [start, stop, step]}``, or ``{"other": [type name, truth value]}``.

Loaded by path beside programs; standard library only.
"""

import json
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 100
"""Maximum nesting of containers."""

MAX_RANGE_LENGTH = 100_000
"""Maximum number of elements of a range."""


@dataclass(frozen=True, eq=False)
class OpaqueValue:
    """An object that is not plain data: it equals nothing, and only its type's name and its truth value are known."""

    name: str
    truth: bool


def dumps(value: Any) -> str:
    """Return a value as text; subclasses of plain types become those types, NumPy scalars Python numbers."""
    return json.dumps(_plain(value, MAX_DEPTH))


def loads(text: str | bytes) -> Any:
    """Parse the text of a value, which may be hostile; raises ``ValueError`` if it is invalid."""
    try:
        return _value(json.loads(text), MAX_DEPTH)
    except (RecursionError, TypeError) as error:  # unhashable elements
        raise ValueError(f"no value: {error}") from None


def _plain(value: Any, depth: int) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if depth == 0:
        return {"other": [type(value).__name__, True]}
    if isinstance(value, list):
        return [_plain(element, depth - 1) for element in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [_plain(element, depth - 1) for element in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"set": [_plain(element, depth - 1) for element in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"frozenset": [_plain(element, depth - 1) for element in frozenset.__iter__(value)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, depth - 1), _plain(one, depth - 1)] for key, one in dict.items(value)]}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    try:
        return {"other": [type(value).__name__, bool(value)]}
    except Exception:
        return {"other": [type(value).__name__, True]}


def _value(plain: Any, depth: int) -> Any:
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    if depth == 0:
        raise ValueError(f"more than {MAX_DEPTH} nested containers")
    if isinstance(plain, list):
        return [_value(element, depth - 1) for element in plain]
    if len(plain) != 1:
        raise ValueError(f"an object with {len(plain)} keys")
    ((kind, content),) = plain.items()
    if kind == "bytes" and isinstance(content, str):
        return bytes.fromhex(content)
    if not isinstance(content, list):
        raise ValueError(f"{kind!r} of {type(content).__name__}")
    if kind == "dict":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
            raise ValueError("a dict whose entries are not pairs")
        return {_value(key, depth - 1): _value(value, depth - 1) for key, value in content}
    if kind in ("tuple", "set", "frozenset"):
        elements = [_value(element, depth - 1) for element in content]
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](elements)
    if kind == "range" and [type(part) for part in content] == [int, int, int]:
        made = range(*content)
        if abs(made.stop - made.start) > abs(made.step) * MAX_RANGE_LENGTH:
            raise ValueError(f"a range of more than {MAX_RANGE_LENGTH} elements")
        return made
    if kind == "complex" and [type(part) for part in content] == [float, float]:
        return complex(*content)
    if kind == "other" and [type(part) for part in content] == [str, bool]:
        return OpaqueValue(content[0][:100], content[1])
    raise ValueError(f"no value is called {kind!r}")
