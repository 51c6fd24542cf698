"""Which operations make the host wait for a GPU, and the lines of the library that caused those that ran."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rlhfkit

LIBRARY = str(Path(rlhfkit.__file__).parent) + "/"
TESTS = str(Path(__file__).parent.parent) + "/"

WAITING_OPERATIONS = frozenset(
    {
        "aten::_local_scalar_dense",  # item(), bool(), float(), int()
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_scatter_backward",  # selects the gradients of the source: it has to know how many
        "aten::masked_select",
        "aten::multinomial",  # checks the probabilities
        "aten::nonzero",
        "aten::repeat_interleave.Tensor",  # unless its output_size is given
        "aten::unique_consecutive",
        "aten::unique_dim",
    }
)
"""Operations whose result has a size or a value that the host must know: PyTorch's CUDA kernels synchronize."""
INDEXING = frozenset({"aten::index.Tensor", "aten::_unsafe_index.Tensor"})
ASSIGNMENTS = frozenset({"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


class HostWait(NamedTuple):
    """One wait."""

    operation: str
    """Of PyTorch, such as ``aten::nonzero``, or ``copy to the host``, ``copy to the device``, ``tolist``."""
    place: str
    """Innermost function of rlhfkit: ``models/forward.py policy_output``; else of other code: ``torch/...``."""
    line: int


class HostWaits(list[HostWait]):
    """The waits within :func:`record_host_waits`, in order."""

    @property
    def lines(self) -> Counter[str]:
        """How often each line waited for what, to be read by people."""
        return Counter(f"{wait.place}:{wait.line} {wait.operation}" for wait in self)


_recorders: list[HostWaits] = []


@contextmanager
def record_host_waits() -> Iterator[HostWaits]:
    """Record the waits of all threads in this context."""
    waits = HostWaits()
    _recorders.append(waits)
    try:
        yield waits
    finally:
        # By identity: two empty lists are equal.
        del _recorders[next(place for place, one in enumerate(_recorders) if one is waits)]


def note_wait(operation: str) -> None:
    """Add a wait to all recorders."""
    if _recorders:
        wait = HostWait(operation, *calling_place())
        for waits in _recorders:
            waits.append(wait)


def calling_place() -> tuple[str, int]:
    """Innermost function of rlhfkit that is running, without one of other code; and its line."""
    frame: Any = sys._getframe(1)
    other: tuple[str, int] | None = None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if file.startswith(LIBRARY):
            return f"{file.removeprefix(LIBRARY)} {name}", frame.f_lineno
        if other is None and str(Path(__file__).parent) not in file and "/torch/" not in file:
            short = file.rpartition("site-packages/")[2].removeprefix(TESTS)
            other = f"{short} {name}", frame.f_lineno
        frame = frame.f_back
    return other or ("unknown", 0)


def waiting_operation(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Name of an operation on simulated tensors if CUDA would wait in it; copies between devices are not among them."""
    name = function._schema.name
    full = f"{name}.{function._overloadname}"
    if full == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is not None:
        return None
    if name in WAITING_OPERATIONS or full in WAITING_OPERATIONS:
        return name
    if full in INDEXING and _has_mask(args[1]):
        return f"{name} with a mask"
    # x[mask] = number is a masked_fill without a wait. Python's numbers arrive here as tensors without dimensions.
    if name in ASSIGNMENTS and _has_mask(args[1]) and args[2].dim():
        return f"{name} with a mask"
    return None


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
