"""``DeltaSender`` and ``WeightCopy``: send what has changed since the last sync, and load whole layers from a copy.

After an update with a small learning rate most 16-bit weights are the same bit for bit, as the change is less than half
of their last digit. The trainer keeps a copy of what the engines have and compares bits, so engines end with exactly
the weights of a full transfer. A changed tensor is sent as a patch (which entries, and their new values) or whole,
whichever is shorter; an unchanged one is not sent.

Patches travel as ordinary tensors under names of their own, so every transport takes them.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.sender import Receivers, WeightSender, verified

HEADER = "rlhfkit.delta"
"""First tensor of a transfer of this kind: (2,) int64, the number of the transfer it builds on and its own."""
_PATCH = "@patch"  # after a weight's name
_NOTHING = -1  # as the number of a transfer: this one builds on none and holds every tensor
_BLOCK = 2**16  # entries of a weight whose positions are counted in 16 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as (N,) integers of its size: equal bits are compared, NaN and -0 included."""
    return tensor.reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])


def checksum(bits: Tensor) -> Tensor:
    """(2,) int64 of (N,) integers: their sum, and one that also depends on where they are."""
    rows = bits[: len(bits) // 512 * 512].view(-1, 512)
    columns, lines = rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64)
    rest = bits[rows.numel() :].to(torch.int64)
    places = [(part * torch.arange(1, 1 + len(part))).sum() for part in (columns, lines, rest)]
    return torch.stack([columns.sum() + rest.sum(), places[0] + 7 * places[1] + 49 * places[2]])


def encode_patch(old: Tensor, new: Tensor) -> Tensor | None:
    """Encode where ``new`` differs from ``old``, contiguous tensors of one type and shape.

    A patch has, in bytes: the checksum of the new tensor, how many entries of each block of 65,536 changed, their new
    values, and their places within the block, of 2 bytes each.

    Returns:
        (bytes,) uint8; ``None`` if nothing has changed. May be longer than the tensor.
    """
    old_bits, new_bits = _bits(old), _bits(new)
    changed = (old_bits != new_bits).nonzero().squeeze(-1)
    if not len(changed):
        return None
    counts = torch.bincount(changed // _BLOCK, minlength=-(-len(new_bits) // _BLOCK)).to(torch.int32)
    places = (changed % _BLOCK).to(torch.int32).to(torch.int16)  # wraps; read without its sign
    parts = (checksum(new_bits), counts, new_bits[changed], places)
    return torch.cat([part.view(torch.uint8) for part in parts])


def apply_patch(tensor: Tensor, patch: Tensor) -> None:
    """Bring a contiguous tensor in place to the state that ``patch`` was encoded for.

    Raises:
        RuntimeError: If it does not then have the checksum of that state.
    """
    bits = _bits(tensor)
    num_blocks, size = -(-len(bits) // _BLOCK), tensor.dtype.itemsize
    # Slices are cloned, as a view of another type must begin at a multiple of its size.
    expected, patch = patch[:16].clone().view(torch.int64), patch[16:]
    counts, patch = patch[: 4 * num_blocks].clone().view(torch.int32).long(), patch[4 * num_blocks :]
    total = int(counts.sum())
    values, places = patch[: size * total].clone().view(bits.dtype), patch[size * total :].clone().view(torch.int16)
    blocks = torch.repeat_interleave(torch.arange(num_blocks), counts)
    bits[blocks * _BLOCK + (places.long() & 0xFFFF)] = values
    if not torch.equal(checksum(bits), expected):
        raise RuntimeError("the patched weight has another checksum than the trainer's")


class DeltaSender:
    """Sends through ``sender`` what has changed since the last successful transfer to the same engines.

    The first transfer after a connect (engines started, restarted or failed) holds everything. A copy of all weights
    stays in this process's main memory.
    """

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self.backend = sender.backend
        self.recoverable = sender.recoverable
        self.sent_bytes = 0
        """Bytes of the last transfer."""
        self._copy: dict[str, Tensor] = {}
        self._infos: Sequence[WeightInfo] = ()
        self._number = 0
        self._base = _NOTHING  # the transfer that all receivers have, with the tensors of the copy

    def connect(self, receivers: Receivers) -> None:
        """Connect to the workers."""
        self._base = _NOTHING
        self._sender.connect(receivers)

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send the changes and wait until every worker has them."""
        base = self._base if list(infos) == list(self._infos) else _NOTHING
        self._base, self._infos, self._number = _NOTHING, tuple(infos), self._number + 1
        header = (HEADER, torch.tensor([base, self._number]))
        stream = verified(infos, weights)
        if base == _NOTHING:
            announced = [_info(*header), *infos]
            self._send(receivers, announced, self._everything(header, stream))
        else:
            # Announced before it is sent, so all of it is encoded first; whole tensors are those of the copy.
            changes = [header, *self._changes(stream)]
            self._send(receivers, [_info(*change) for change in changes], iter(changes))
        self._base = self._number

    def _send(self, receivers: Receivers, infos: list[WeightInfo], tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.sent_bytes = sum(info.num_bytes for info in infos)
        self._sender.send(receivers, infos, tensors)

    def _everything(
        self, header: tuple[str, Tensor], weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        yield header
        for name, tensor in weights:
            if name not in self._copy or self._copy[name].dtype != tensor.dtype:
                self._copy[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copy[name] = self._copy[name].view(tensor.shape).copy_(tensor)
            yield name, self._copy[name]

    def _changes(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            known, new = self._copy[name], tensor.detach().to("cpu").contiguous()
            patch = encode_patch(known, new)
            if patch is None:
                continue
            known.copy_(new)
            yield (name, known) if patch.nbytes >= known.nbytes else (name + _PATCH, patch)

    def close(self) -> None:
        """Disconnect; the next transfer holds everything."""
        self._base = _NOTHING
        self._sender.close()


def _info(name: str, tensor: Tensor) -> WeightInfo:
    return WeightInfo(name, tuple(tensor.shape), tensor.dtype)


class WeightCopy:
    """A worker's copy of the weights in the trainer's form, from which the layers with changes are loaded again.

    Layers cannot be patched in place in general: those of a CPU are packed, those of quantized engines quantized from
    weights that are gone, and fused ones are loaded whole. ``pinned``: keep it in memory that GPUs read fast.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._tensors: dict[str, Tensor] = {}
        self._number = _NOTHING  # the transfer that it has in full
        self._arriving = _NOTHING
        self._changed: set[str] = set()

    def receive(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take the next tensors of a transfer; they are copied.

        Raises:
            RuntimeError: If the transfer builds on another one than this copy holds, or a checksum is wrong. The copy
                is unusable until the next transfer of everything.
        """
        for name, tensor in named:
            if name == HEADER:
                self._begin(*tensor.tolist())
            elif name.endswith(_PATCH):
                weight = name.removesuffix(_PATCH)
                try:
                    apply_patch(self._tensors[weight], tensor.cpu())
                except RuntimeError as error:
                    raise RuntimeError(f"{weight}: {error}") from None
                self._changed.add(weight)
            else:
                self._store(name, tensor)

    def _begin(self, base: int, number: int) -> None:
        if base not in (_NOTHING, self._number):
            raise RuntimeError(f"the trainer sends what has changed since transfer {base}; here is {self._number}")
        if base == _NOTHING:
            self._tensors.clear()
        self._number, self._arriving, self._changed = _NOTHING, number, set()

    def _store(self, name: str, tensor: Tensor) -> None:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
        self._tensors[name].copy_(tensor)
        self._changed.add(name)

    def finish(self, *, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        """End a transfer and yield what has to be loaded: all weights of every layer in which one has changed.

        ``whole``: all weights of the model. Tensors that belong to no numbered layer count as one layer.
        """
        self._number = self._arriving
        layers = {_layer(name) for name in self._changed}
        return ((name, one) for name, one in self._tensors.items() if whole or _layer(name) in layers)


def _layer(name: str) -> str:
    """The name up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``, or nothing."""
    parts = name.split(".")
    first = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: first + 1])
