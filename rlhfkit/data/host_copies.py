"""What tensors on a GPU hold, for the host, where it is known from before they were copied there.

A forward pass needs the lengths of its sequences on the host. To read them from the GPU it would have to wait until the
GPU has done all that it was asked to do before; from the batch's tensors on the CPU it does not.
"""

from collections.abc import Callable, MutableMapping
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class _Copy(NamedTuple):
    """The tensor on the CPU, and how often both had been changed in place."""

    tensor: Tensor
    versions: tuple[int, int]


_copies: MutableMapping[Tensor, _Copy] = WeakIdKeyDictionary()


def remember_host_copy(tensor: Tensor, source: Tensor) -> Tensor:
    """Remember that ``tensor`` has been copied from ``source`` on the CPU, as long as it exists; return it."""
    tracked = not (tensor.is_inference() or source.is_inference())  # others have no version
    if source.device.type == "cpu" and tensor.device.type != "cpu" and tracked:
        _copies[tensor] = _Copy(source, (tensor._version, source._version))
    return tensor


def host_copy(tensor: Tensor) -> Tensor | None:
    """A tensor on the CPU with the same values, itself if it is there; ``None`` if they would have to be copied."""
    if tensor.device.type == "cpu":
        return tensor
    known = _copies.get(tensor)
    if known is None or known.versions != (tensor._version, known.tensor._version):
        return None
    return known.tensor


def on_both(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``compute(*tensors)``, computed on the host too where all tensors are known there."""
    result, known = compute(*tensors), [host_copy(tensor) for tensor in tensors]
    copies = [copy for copy in known if copy is not None]
    if len(copies) < len(tensors) or result.device.type == "cpu":
        return result
    return remember_host_copy(result, compute(*copies))
