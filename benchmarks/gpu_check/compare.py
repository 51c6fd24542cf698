"""How far two results are apart, how long something takes, and how much memory it needs."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.check import Setting


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in tensors_of(value[key])]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, tuple | list) else []


def distance(found: Any, expected: Any) -> float:
    """Largest relative distance in norm between tensors of ``found`` and ``expected``; infinite if shapes differ.

    NaN and infinities must be in the same places.
    """
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    return max((_distance(one, other) for one, other in pairs), default=0.0)


def _distance(found: Tensor, expected: Tensor) -> float:
    one, other = found.detach().cpu().double(), expected.detach().cpu().double()
    if one.shape != other.shape:
        return float("inf")
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite) or not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    one, other = one[finite], other[finite]
    # Scalars near 0 are differences of larger numbers: 1e-3 keeps their rounding from counting as a distance.
    return float((one - other).norm() / other.norm().clamp(min=1e-3))


def largest_difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Largest absolute difference of any entry."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.detach().cpu().double() - two.detach().cpu().double()).abs().max()) for one, two in pairs)


def seconds_of(call: Callable[[], Any], setting: Setting, *, repeats: int = 3) -> float:
    """Seconds of the fastest of some calls, after one that is not timed."""
    call()
    best = float("inf")
    for _ in range(repeats):
        setting.synchronize()
        start = time.perf_counter()
        call()
        setting.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def peak_gib(call: Callable[[], Any], setting: Setting) -> float | None:
    """GiB that a call needs beside what was allocated before; ``None`` if that is not known, as on a CPU."""
    if not setting.on_gpu:
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30
