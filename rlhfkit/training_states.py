"""``TrainingStates``: move the weights, gradients and optimizer states of a run to CPU memory, and back in place.

DeepSpeed 0.19.8 can offload states of ZeRO 1 and 2, of ZeRO 3 with its FusedAdam only, and of ZeRO 0 not at all, and it
rebuilds views that other parts hold. Here the memory behind tensors is freed while the tensors stay: parameters,
optimizers and engines keep every reference and view, so this works with any optimizer and strategy, and what comes back
is equal bit for bit. (FSDP frees the memory of parameters in the same way.) Imports torch only.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

log = logging.getLogger(__name__)

Part = Literal["weights", "gradients", "communication", "optimizer"]
"""Parameters and buffers, of frozen children too; gradients; DeepSpeed's buckets in which gradients are reduced, whose
contents are not needed after a backward pass; all else that the optimizers hold: main weights and moments."""

_SMALLEST_BYTES = 512
"""Smaller storages stay: CUDA's allocator of torch 2.13 rounds up to 512 bytes."""
_CHUNK_BYTES = 1 << 28
"""Host memory is taken in chunks: torch 2.13 rounds pinned memory up to a power of two."""
_PACKAGES = {"torch", "deepspeed", "types"}
"""Packages of the objects that are searched for tensors, beside those of the optimizers."""


class TrainingStates:
    """The tensors of a training run on one device, and where they are. Local to a rank: no method is a collective.

    While weights are in CPU memory, a forward pass or a ``state_dict`` of the module brings everything back first. Any
    other use of the tensors' values in that time reads freed memory, which ends the process. Memory that torch cannot
    free stays: on a CPU that of weights mapped from a file, as ``from_pretrained`` loads them.

    Args:
        module: Owner of the weights; its direct children can be kept on the device by name.
        optimizers: Returns the optimizers, or other objects that hold states, at the time of the call.
        device: Device of the states; tensors elsewhere, for example offloaded by ZeRO, are left alone.
    """

    def __init__(self, module: nn.Module, optimizers: Callable[[], Iterable[object]], device: torch.device) -> None:
        self._module = module
        self._optimizers = optimizers
        self._device = torch.device(device)
        self._copies: dict[Part, HostCopies] = {}
        self._guards: list[Any] = []
        self._lock = threading.RLock()  # rewards run in threads, and may use the module

    @property
    def offloaded(self) -> dict[Part, int]:
        """Bytes of each part that were moved to CPU memory and are there now."""
        return {part: copies.num_bytes for part, copies in self._copies.items() if copies.num_bytes}

    def state_bytes(self) -> dict[Part, int]:
        """Bytes of each part that are on the device now."""
        return {part: sum(one.nbytes() for one in found.values()) for part, found in self._storages().items()}

    def offload_states(self, *, weights: bool = True, keep: Collection[str] = ()) -> None:
        """Move gradients and optimizer states to CPU memory, and with ``weights`` the weights, except those of children
        named in ``keep``. What is there already stays. If it fails, everything is brought back.
        """
        with self._lock:
            _synchronize(self._device)
            try:
                for part, storages in self._storages(keep).items():
                    if part != "weights" or weights:
                        copies = self._copies.setdefault(part, HostCopies(with_contents=part != "communication"))
                        copies.take(storages.values(), self._device)
            except BaseException:
                self.reload_states()
                raise
            self._guard()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def reload_states(self, *, optimizer: bool = True) -> None:
        """Bring the weights back to the device, and with ``optimizer`` everything else. What is there stays."""
        with self._lock:
            for part in self._copies:
                if part == "weights" or optimizer:
                    self._copies[part].put_back()
            _synchronize(self._device)
            self._guard()

    def _storages(self, keep: Collection[str] = ()) -> dict[Part, dict[int, torch.UntypedStorage]]:
        """The storages of each part on the device, once each, by address of their handle."""
        seen: set[int] = set()

        def new(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
            storages = {}
            for tensor in tensors:
                for storage in _storages_of(tensor, self._device):
                    if storage._cdata not in seen:
                        seen.add(storage._cdata)
                        storages[storage._cdata] = storage
            return storages

        for name in keep:
            new(_weights(self._module.get_submodule(name)))
        weights = new(_weights(self._module))
        gradients = new(p.grad for p in self._module.parameters() if p.grad is not None)
        found = list(_held_tensors(self._optimizers()))
        parts: dict[Part, dict[int, torch.UntypedStorage]] = {"weights": weights, "gradients": gradients}
        for part in ("communication", "gradients", "optimizer"):
            parts[part] = parts.get(part, {}) | new(tensor for tensor, of in found if of == part)
        return parts

    # ------------------------------------------------------------------ what uses the states while they are away

    def _guard(self) -> None:
        """Have forward passes and state dictionaries reload what they read, as freed memory crashes the process."""
        for handle in self._guards:
            handle.remove()
        self._guards = []
        if not self.offloaded:
            return
        saved: Any  # torch 2.13 does not type the method
        for saved in (self._module, *self._module.children(), *_inner(self._module)):
            self._guards.append(saved.register_state_dict_pre_hook(lambda *_: self._reload_for("a state_dict")))
        if "weights" in self.offloaded:
            for module in self._module.modules():
                if module._parameters or module._buffers:  # before the hooks with which ZeRO 3 gathers parameters
                    hook = module.register_forward_pre_hook(lambda *_: self._reload_for("a forward pass"), prepend=True)
                    self._guards.append(hook)

    def _reload_for(self, what: str) -> None:
        with self._lock:
            if self.offloaded:
                log.warning("%s needed training states that were in CPU memory: they are brought back", what)
                self.reload_states()


class HostCopies:
    """Contents of storages in CPU memory, pinned for CUDA, which is kept for the next time.

    Without ``with_contents`` memory is only freed and allocated again.
    """

    def __init__(self, *, with_contents: bool = True) -> None:
        self._with_contents = with_contents
        self._chunks: list[Tensor] = []
        self._held: list[tuple[torch.UntypedStorage, int, int]] = []  # storage, its first byte here, its size
        self.num_bytes = 0
        """Size of the storages whose memory is freed now."""

    def take(self, storages: Iterable[torch.UntypedStorage], device: torch.device) -> None:
        """Copy the contents of storages on ``device`` here and free their memory."""
        taken = [storage for storage in storages if storage.nbytes()]
        for storage in taken:
            size = storage.nbytes()
            self._held.append((storage, self.num_bytes, size))
            self.num_bytes += size
            if not self._with_contents:
                continue
            self._allocate(device)
            for host, there in self._pieces(*self._held[-1]):
                host.copy_(there, non_blocking=True)
        _synchronize(device)
        for storage in taken:
            storage.resize_(0)

    def put_back(self) -> None:
        """Allocate the storages' memory again and copy their contents back; not finished before a synchronization."""
        for storage, first, size in self._held:
            storage.resize_(size)
            for host, there in self._pieces(storage, first, size) if self._with_contents else ():
                there.copy_(host, non_blocking=True)
        self._held, self.num_bytes = [], 0

    def _allocate(self, device: torch.device) -> None:
        while len(self._chunks) * _CHUNK_BYTES < self.num_bytes:
            self._chunks.append(self.new_chunk(pinned=device.type == "cuda"))

    def new_chunk(self, *, pinned: bool) -> Tensor:
        """Return a chunk of host memory as bytes; pinned memory is copied several times faster."""
        if pinned:
            try:
                return torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                log.warning("offloading is slow, as no more memory can be pinned: %s", error)
        return torch.empty(_CHUNK_BYTES, dtype=torch.uint8)

    def _pieces(self, storage: torch.UntypedStorage, first: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of equal bytes: in a chunk here, and in the storage."""
        there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        done = 0
        while done < size:
            chunk, start = divmod(first + done, _CHUNK_BYTES)
            length = min(_CHUNK_BYTES - start, size - done)
            yield self._chunks[chunk][start : start + length], there[done : done + length]
            done += length


def _synchronize(device: torch.device) -> None:
    """Wait for all streams: engines of DeepSpeed copy and reduce on their own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _inner(module: nn.Module) -> list[nn.Module]:
    """Modules inside engines that are direct children."""
    inner = (child._modules.get("module") for child in module.children())
    return [one for one in inner if one is not None]


def _storages_of(tensor: Tensor, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Storages of a tensor that can be moved: on the device, not tiny, and with memory that torch may free."""
    if is_traceable_wrapper_subclass(tensor):  # for example DTensor
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _storages_of(getattr(tensor, name), device)
        return
    if tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() >= _SMALLEST_BYTES and storage.resizable():
        yield storage


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, and the shards that ZeRO 3 attaches to parameters."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor
        yield from (value for value in vars(tensor).values() if isinstance(value, Tensor))


def _held_tensors(roots: Iterable[object]) -> Iterator[tuple[Tensor, Part]]:
    """Tensors that objects hold, directly or not, with the part that the attributes on the way tell by their names.

    Searches attributes of optimizers, containers and objects of the same packages; of modules only what they register,
    as a LightningModule refers to the whole Trainer.
    """
    roots = list(roots)
    packages = _PACKAGES | {type(root).__module__.partition(".")[0] for root in roots}
    stack: list[tuple[Any, Part]] = [(root, "optimizer") for root in roots]
    seen: set[int] = set()
    while stack:
        value, part = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value, part
            if value.is_leaf and value.grad is not None:
                stack.append((value.grad, "gradients"))
        if isinstance(value, nn.Module):
            stack += [(held, part) for held in (value._parameters, value._buffers, value._modules)]
        elif isinstance(value, Mapping):
            stack += [(held, part) for pair in value.items() for held in pair]
        elif isinstance(value, list | tuple | set):
            stack += [(held, part) for held in value]
        elif isinstance(value, Tensor) or type(value).__module__.partition(".")[0] in packages:
            stack += [(held, _part_of(name, part)) for name, held in getattr(value, "__dict__", {}).items()]


def _part_of(attribute: str, part: Part) -> Part:
    """The part of what an attribute holds; ``part`` is that of the object with the attribute."""
    if part != "optimizer":
        return part
    if attribute == "ipg_buckets":  # deepspeed 0.19.8 does not restore their contents either
        return "communication"
    return "gradients" if "grad" in attribute else "optimizer"
