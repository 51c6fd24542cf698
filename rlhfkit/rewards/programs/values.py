"""Python values as plain data, exchanged between a program and its tests; parsing them executes no code.

JSON has ``None``, booleans, numbers, texts and lists. All else is an object with one key, the kind of value:
``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``, ``{"bytes": hexadecimal}``, ``{"fraction": [1, 2]}``, and
``{"other": [type name, truth value]}`` for what cannot be carried over.

Loaded by path beside programs; standard library only.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_DEPTH = 300
"""Maximum nesting of containers."""

MAX_ELEMENTS = 1_000_000
"""Maximum number of elements of an iterator, which may be endless."""

_LARGE = 8192  # bits above which integers are written in hexadecimal: Python limits the digits of decimals


class OpaqueValue:
    """An object that is not plain data: only its type's name and its truth value are known.

    It is neither equal nor unequal to anything.
    """

    def __init__(self, name: str, truth: bool) -> None:
        self.name = name
        self.truth = truth

    def __bool__(self) -> bool:
        """Return the truth value of the object."""
        return self.truth

    def __eq__(self, other: object) -> bool:
        """Return false."""
        return False

    def __ne__(self, other: object) -> bool:
        """Return false."""
        return False

    __hash__ = object.__hash__


class ArrayValue(Sequence[Any]):
    """The elements of an ``array.array`` or a NumPy array; equal to another one only, as in Python."""

    def __init__(self, elements: list[Any]) -> None:
        self.elements = elements

    def __len__(self) -> int:
        """Return the number of elements."""
        return len(self.elements)

    def __getitem__(self, index: Any) -> Any:
        """Return an element, or an array of a slice."""
        return ArrayValue(self.elements[index]) if isinstance(index, slice) else self.elements[index]

    def __eq__(self, other: object) -> bool:
        """Whether the other one is an array of equal elements."""
        return isinstance(other, ArrayValue) and self.elements == other.elements

    __hash__ = None  # type: ignore[assignment]  # what is compared by value and can change has no hash


def dumps(value: Any) -> str:
    """Return a value as text; subclasses of plain types become those types, NumPy scalars Python numbers.

    Iterators are read to their end, which runs their code.
    """
    return json.dumps(_plain(value, MAX_DEPTH))


def loads(text: str | bytes, opaque: list[str] | None = None) -> Any:
    """Parse the text of a value, which may be hostile; raises ``ValueError`` if it is invalid.

    The time may grow with the square of its length: integers can be made to have one hash. Type names of what could not
    be carried over are added to ``opaque``.
    """

    def build(given: dict[str, Any]) -> Any:
        ((kind, content),) = given.items()
        if kind in _OF_TEXT and isinstance(content, str):
            return _OF_TEXT[kind](content)
        if kind not in _OF_ELEMENTS or not isinstance(content, list):
            raise ValueError(f"no value is {kind!r} of {type(content).__name__}")
        value = _OF_ELEMENTS[kind](content)
        if isinstance(value, OpaqueValue) and opaque is not None:
            opaque.append(value.name)
        return value

    try:
        return json.loads(text, object_hook=build)
    except (RecursionError, TypeError, ArithmeticError) as error:  # unhashable elements, a denominator of 0
        raise ValueError(f"no value: {error}") from None


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    numerator, denominator = parts
    return Fraction(numerator, denominator)


def _complex(parts: list[Any]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _other(parts: list[Any]) -> OpaqueValue:
    name, truth = parts
    if not isinstance(name, str) or not isinstance(truth, bool):
        raise ValueError("'other' is a type's name and a truth value")
    return OpaqueValue(name[:100], truth)


_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16), "bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "decimal": _decimal,
}  # fmt: skip
_OF_ELEMENTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "deque": deque, "array": ArrayValue,
    "iterator": iter, "keys": lambda keys: dict.fromkeys(keys).keys(), "items": lambda pairs: dict(pairs).items(),
    "values": lambda values: dict(enumerate(values)).values(), "range": lambda bounds: range(*bounds),
    "complex": _complex, "fraction": _fraction, "other": _other,
}  # fmt: skip
"""Kind of value to the function that makes it of its text, or of its elements."""

_BUILT_IN: list[tuple[type, str, Callable[[Any], Iterable[Any]]]] = [
    (tuple, "tuple", tuple.__iter__), (set, "set", set.__iter__), (frozenset, "frozenset", frozenset.__iter__),
    (range, "range", lambda value: (value.start, value.stop, value.step)),
    (complex, "complex", lambda value: (value.real, value.imag)), (type({}.keys()), "keys", iter),
    (type({}.values()), "values", iter),
]  # fmt: skip
_LIBRARY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "collections.deque": ("deque", list), "array.array": ("array", list), "numpy.ndarray": ("array", list),
    "fractions.Fraction": ("fraction", lambda value: [value.numerator, value.denominator]),
    "decimal.Decimal": ("decimal", str),
}  # fmt: skip
"""Types by name, which need not be imported to be recognised."""


def _plain(value: Any, depth: int) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if number.bit_length() < _LARGE else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytearray):  # in front of what it could be taken for
        return {"bytearray": bytearray.hex(value)}
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    name = type(value).__name__
    if depth == 0:
        return {"other": [f"{name} inside {MAX_DEPTH} containers", True]}
    if isinstance(value, list):
        return [_plain(element, depth - 1) for element in list.__iter__(value)]
    if isinstance(value, dict | type({}.items())):
        kind, pairs = ("dict", dict.items(value)) if isinstance(value, dict) else ("items", value)
        return {kind: [[_plain(key, depth - 1), _plain(one, depth - 1)] for key, one in pairs]}
    for built_in, kind, elements in _BUILT_IN:
        if isinstance(value, built_in):
            return {kind: [_plain(element, depth - 1) for element in elements(value)]}
    for base in type(value).__mro__:
        if f"{base.__module__}.{base.__name__}" in _LIBRARY:
            kind, content = _LIBRARY[f"{base.__module__}.{base.__name__}"]
            given = content(value)
            return {kind: given if isinstance(given, str) else [_plain(element, depth - 1) for element in given]}
    if hasattr(type(value), "__next__"):
        read: list[Any] = []
        for element in value:
            if len(read) == MAX_ELEMENTS:
                return {"other": [f"{name} of more than {MAX_ELEMENTS} elements", True]}
            read.append(_plain(element, depth - 1))
        return {"iterator": read}
    try:
        return {"other": [name, bool(value)]}
    except Exception:
        return {"other": [name, True]}
