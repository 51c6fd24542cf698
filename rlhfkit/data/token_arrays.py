"""How records keep numbers per token: as arrays, read and set as lists.

:func:`store_as_arrays` turns fields of a dataclass with slots into :class:`TokenField`. Their slots then hold an
``array.array``, or :class:`Runs`, in place of a Python list, which takes up to 36 bytes a number; reading one makes a
new list. Arrays are shared by copies of a record and never changed in place.

========================  ==================================================================  ===============
Field                     Stored as                                                           Bytes per token
========================  ==================================================================  ===============
token ids                 int32; int64 if one does not fit                                    4
log-probs, rewards        float32 if that holds every number exactly, else float64            4 or 8
masks                     one byte each                                                       1
policy versions           runs of equal versions, 12 bytes each                               about 0
========================  ==================================================================  ===============
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = Sequence[int] | array[int] | Tensor | NDArray[Any]
    """Whole numbers per token; arrays and tensors are copied without making Python numbers of them."""
    Floats = Sequence[float] | array[float] | Tensor | NDArray[Any]
    """Numbers per token."""
    Booleans = Sequence[bool] | array[int] | Tensor | NDArray[Any]
    """True or false per token."""

_DTYPES = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64, "B": torch.uint8}
_INT32 = torch.iinfo(torch.int32)


@dataclass(frozen=True, slots=True)
class Runs:
    """A sequence of integers in which neighbours are mostly equal: each run's value and length."""

    values: array[int]
    """int64."""
    lengths: array[int]
    """int32."""

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Runs:
        """Return the runs with these ``(value, length)``; equal neighbours are joined, empty ones left out.

        Raises:
            ValueError: If a length is negative.
        """
        runs = cls(array("q"), array("i"))
        for value, length in pairs:
            if length < 0:
                raise ValueError(f"a run of equal policy versions has at least 0 tokens, got {length}")
            if not length:
                continue
            if runs.values and runs.values[-1] == value:
                runs.lengths[-1] += length
            else:
                runs.values.append(value)
                runs.lengths.append(length)
        return runs

    def __len__(self) -> int:
        """The length of the sequence."""
        return sum(self.lengths)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """``(value, length)`` of each run."""
        return list(zip(self.values, self.lengths, strict=True))


class Encoding(NamedTuple):
    """How a field is stored."""

    encode: Callable[[Any], Any]
    """Makes the array of a list, an array, or a tensor."""
    decode: Callable[[Any], list[Any]]
    """Makes a list of the array."""


class TokenField:
    """A slot of a record that holds an array, and is read and set as a list."""

    def __init__(self, slot: Any, name: str, encoding: Encoding) -> None:
        self.slot = slot
        self._name = name
        self._encode, self._decode = encoding

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        """Return a new list."""
        if record is None:
            return self
        held = self.slot.__get__(record)
        return None if held is None else self._decode(held)

    def __set__(self, record: Any, values: Any) -> None:
        """Copy the numbers; raises TypeError if some are not of the field's kind."""
        try:
            self.slot.__set__(record, None if values is None else self._encode(values))
        except (TypeError, ValueError, OverflowError) as error:
            raise type(error)(f"{type(record).__name__}.{self._name}: {error}") from error


def store_as_arrays(record: type, encodings: Mapping[str, Encoding]) -> None:
    """Store these fields of a dataclass with slots as arrays."""
    for name, encoding in encodings.items():
        setattr(record, name, TokenField(getattr(record, name), name, encoding))


@cache
def _slots(kind: type) -> dict[str, Any]:
    """What reads and writes each field of a record as it is stored."""
    found = {field.name: getattr(kind, field.name) for field in fields(kind)}
    return {name: each.slot if isinstance(each, TokenField) else each for name, each in found.items()}


def stored(record: Any, name: str) -> Any:
    """Return a field of a record as it is stored; not to be changed, as copies of the record share it."""
    return _slots(record.__class__)[name].__get__(record)


def stored_state(record: Any) -> dict[str, Any]:
    """Return all fields of a record as they are stored."""
    return {name: slot.__get__(record) for name, slot in _slots(record.__class__).items()}


def restore_state(record: Any, state: Mapping[str, Any]) -> None:
    """Set all fields of a record to what :func:`stored_state` returned."""
    slots = _slots(record.__class__)
    for name, held in state.items():
        slots[name].__set__(record, held)


def encode_integers(values: Integers) -> array[int]:
    """Copy integers into an int32 array, or an int64 array if one does not fit."""
    if isinstance(values, list | tuple):
        try:
            return array("i", values)
        except OverflowError:
            return array("q", values)
    tensor = _as_tensor(values)
    if tensor.is_floating_point():
        raise TypeError(f"whole numbers are wanted, got {tensor.dtype}")
    return _copied(tensor, "i" if _fits_int32(tensor) else "q")


def encode_floats(values: Floats) -> array[float]:
    """Copy numbers into a float32 array if it holds each exactly, or into a float64 array."""
    if isinstance(values, list | tuple):
        exact = array("d", values)
        tensor = as_tensor(exact)
    else:
        tensor = _as_tensor(values)
        if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return _copied(tensor, "f")
        exact = _copied(tensor, "d")
        tensor = as_tensor(exact)
    rounded = tensor.float()
    same = bool(((rounded == tensor) | tensor.isnan()).all())
    return _copied(rounded, "f") if same else exact


def encode_booleans(values: Booleans) -> array[int]:
    """Copy booleans, or numbers that count as such, into an array of bytes."""
    if isinstance(values, list | tuple):
        return array("B", bytes(map(bool, values)))
    return _copied(_as_tensor(values) != 0, "B")


def encode_runs(values: Integers | Runs) -> Runs:
    """Find the runs of equal integers."""
    if isinstance(values, Runs):
        return values
    if isinstance(values, list | tuple):
        if not values or values.count(values[0]) == len(values):
            return Runs.of([(values[0], len(values))] if values else [])
        values = array("q", values)
    found, lengths = torch.unique_consecutive(_as_tensor(values).long(), return_counts=True)
    return Runs(_copied(found, "q"), _copied(lengths, "i"))


def decode_array(stored: array[Any]) -> list[Any]:
    """Return the numbers as a list."""
    return stored.tolist()


def decode_booleans(stored: array[int]) -> list[bool]:
    """Return the booleans as a list."""
    return list(memoryview(stored).cast("?")) if stored else []  # an empty buffer cannot be cast


def decode_runs(stored: Runs) -> list[int]:
    """Return the integers as a list."""
    values: list[int] = []
    for value, length in stored.pairs:
        values += [value] * length
    return values


INTEGERS = Encoding(encode_integers, decode_array)
FLOATS = Encoding(encode_floats, decode_array)
BOOLEANS = Encoding(encode_booleans, decode_booleans)
RUNS = Encoding(encode_runs, decode_runs)


def ones(length: int) -> array[int]:
    """Return true for each token."""
    return array("B", bytes([1]) * length)


def zeros(length: int) -> array[float]:
    """Return 0 for each token, float32."""
    return array("f", bytes(4 * length))


def as_tensor(stored: array[Any]) -> Tensor:
    """Return an array as a tensor that shares its memory."""
    dtype = _DTYPES[stored.typecode]
    return torch.frombuffer(stored, dtype=dtype) if len(stored) else torch.empty(0, dtype=dtype)


def concatenate(arrays: Sequence[array[Any]], dtype: torch.dtype) -> Tensor:
    """Join arrays into one tensor of a type."""
    codes = {each.typecode for each in arrays}
    if len(codes) != 1:  # a few of them are wider than the rest
        return torch.cat([as_tensor(each).to(dtype) for each in arrays]) if arrays else torch.empty(0, dtype=dtype)
    joined = array(codes.pop())
    joined.frombytes(b"".join(arrays))
    return as_tensor(joined).to(dtype)


def _as_tensor(values: Any) -> Tensor:
    """Return an array, a tensor, or another buffer as a tensor of one dimension on the CPU, without a copy if possible.

    Arrays of NumPy from Ray are read-only, for which torch would warn; nothing here writes to the tensor.
    """
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
    elif isinstance(values, array) and values.typecode in _DTYPES:
        tensor = as_tensor(values)
    else:
        writable = not hasattr(values, "flags") or values.flags.writeable
        tensor = torch.as_tensor(values if writable else values.copy())
    if tensor.dim() != 1:
        raise ValueError(f"one number per token is wanted, got shape {tuple(tensor.shape)}")
    return tensor


def _copied(tensor: Tensor, code: str) -> array[Any]:
    """Copy a tensor into a new array."""
    copy = array(code, bytes(array(code).itemsize * len(tensor)))
    if len(tensor):
        torch.frombuffer(copy, dtype=_DTYPES[code]).copy_(tensor)
    return copy


def _fits_int32(tensor: Tensor) -> bool:
    if not len(tensor) or tensor.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        return True
    low, high = tensor.long().aminmax()
    return int(low) >= _INT32.min and int(high) <= _INT32.max
