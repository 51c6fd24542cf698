"""``Transport``: how buckets of weights get from the trainer to the workers, over the network or by shared memory.

Both sides alternate between two blocks of memory, so that one is filled while the other is loaded. The blocks are kept
between updates, as reused memory is several times as fast as new memory.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed does not export its type

from rlhfkit.rollout.weight_sync.process_group.groups import Broadcast, TransferGroup
from rlhfkit.rollout.weight_sync.process_group.rendezvous import TrainerWatch
from rlhfkit.rollout.weight_sync.process_group.shared_memory import SharedBlocks
from rlhfkit.rollout.weight_sync.process_group.waiting import Poll, wait_until

_SETTLE_SECONDS = 5.0
"""Time for a failure to become known in better words."""


class Transport(Protocol):
    """A way to send bytes; both sides use the same kind."""

    def send_blocks(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        """Yield blocks to fill. A block is sent when the next one is requested; iterate to the end."""
        ...

    def receive_blocks(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield blocks as they arrive, each valid until the next one is requested."""
        ...

    def close(self) -> None:
        """Disconnect; processes that wait for data fail at once."""
        ...


class NetworkTransport(Transport):
    """Broadcasts in a process group, between any machines: gloo from and to the CPU, NCCL from GPU to GPU.

    ``timeout`` is in seconds per block; ``watch`` looks after the trainer while a worker waits.
    """

    def __init__(self, group: TransferGroup, timeout: float, watch: TrainerWatch | None = None) -> None:
        self._group = group
        self._timeout = timeout
        self._watch = watch
        self._blocks: list[Tensor] = []

    def _block(self, number: int, num_bytes: int) -> Tensor:
        if not self._blocks:
            self._blocks = [torch.empty(0, dtype=torch.uint8, device=self._group.device)] * 2
        if self._blocks[number % 2].numel() < num_bytes:
            self._blocks[number % 2] = torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)
        return self._blocks[number % 2][:num_bytes]

    def _release(self) -> None:
        """Keep main memory, as new memory is slower, and return a GPU's to torch's cache, for the next step's use."""
        if self._group.device.type != "cpu":
            self._blocks = []

    def send_blocks(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        sending: list[Broadcast | None] = [None, None]  # the block before is being sent while one is filled
        for number, num_bytes in enumerate(sizes):
            self._wait(sending[number % 2], poll, f"block {number - 1} of {len(sizes)} was not received by all workers")
            block = self._block(number, num_bytes)
            yield block
            sending[number % 2] = self._group.broadcast(block)
        for number in (len(sizes), len(sizes) + 1):
            self._wait(sending[number % 2], poll, f"block {number - 1} of {len(sizes)} was not received by all workers")
        self._release()

    def receive_blocks(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        if self._watch is None:
            raise RuntimeError("a transport that receives needs a TrainerWatch")
        with self._watch as watch:
            # The next block is received while one is loaded. NCCL waits for the loading of the one before it, which
            # had the same memory, because the current stream has it in its queue.
            arriving = self._receive(0, sizes)
            for number in range(len(sizes)):
                assert arriving is not None
                block, broadcast = arriving
                self._wait(broadcast, watch.poll, f"block {number + 1} of {len(sizes)} did not come from the trainer")
                arriving = self._receive(number + 1, sizes)
                yield block
        self._release()

    def _receive(self, number: int, sizes: Sequence[int]) -> tuple[Tensor, Broadcast] | None:
        if number >= len(sizes):
            return None
        block = self._block(number, sizes[number])
        return block, self._group.broadcast(block)

    def _wait(self, broadcast: Broadcast | None, poll: Poll, late: str) -> None:
        """Wait for a broadcast, unless the other side has failed, which would never take part in it."""
        if broadcast is None:
            return
        wait_until(broadcast.is_completed, poll, self._timeout, lambda: f"{late} within {self._timeout:g} s")
        try:
            broadcast.wait()
        except RuntimeError:
            # An engine's own error, or that the trainer has left, says more than "connection closed by peer".
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: False, poll, _SETTLE_SECONDS, lambda: "")
            raise

    def close(self) -> None:
        self._group.close()
        self._blocks = []


def _pieces(whole: Tensor, num_bytes: int) -> list[Tensor]:
    return [whole[start : start + num_bytes] for start in range(0, whole.numel(), num_bytes)]


class SharedMemoryTransport(Transport):
    """Shared memory on one machine; keys in ``store`` mark blocks as filled or loaded.

    Buckets larger than a block are sent in pieces. Loading a block may take ``timeout`` seconds; waiting for one is
    limited by the store's own timeout. ``workers`` is the number of processes that load.
    """

    def __init__(self, store: Store, blocks: SharedBlocks, workers: int, timeout: float) -> None:
        self._store = store
        self._blocks = blocks
        self._workers = workers
        self._timeout = timeout
        self._number = 0  # number of the next block, counted over all updates, the same on both sides
        self._sends = False

    def _fill(self, num_bytes: int, poll: Poll) -> Tensor:
        """Return the next block to fill, once all workers have loaded its old content."""
        before = self._number - 2
        if before >= 0:
            late = f"workers did not load a block of weights within {self._timeout:g} s"
            loaded = f"loaded/{before}"
            wait_until(lambda: self._store.add(loaded, 0) == self._workers, poll, self._timeout, lambda: late)
            self._store.delete_key(f"loaded/{before}")
            self._store.delete_key(f"filled/{before}")
        return self._blocks.block(self._number)[:num_bytes]

    def _filled(self) -> None:
        self._store.set(f"filled/{self._number}", "yes")
        self._number += 1

    def send_blocks(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        self._sends = True
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                yield self._fill(num_bytes, poll)
                self._filled()
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            yield whole
            for piece in _pieces(whole, self._blocks.num_bytes):
                self._fill(piece.numel(), poll).copy_(piece)
                self._filled()

    def _load(self, num_bytes: int) -> Tensor:
        """Return the next block, once it is filled."""
        if self._store.get(f"filled/{self._number}") != b"yes":
            raise RuntimeError("the trainer has given up sending weights")
        return self._blocks.block(self._number)[:num_bytes]

    def _loaded(self) -> None:
        self._store.add(f"loaded/{self._number}", 1)
        self._number += 1

    def receive_blocks(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                yield self._load(num_bytes)
                self._loaded()
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            for piece in _pieces(whole, self._blocks.num_bytes):
                piece.copy_(self._load(piece.numel()))
                self._loaded()
            yield whole

    def close(self) -> None:
        """On the sending side, tell the workers that nothing more is sent."""
        if self._sends:
            self._store.set(f"filled/{self._number}", "never")
