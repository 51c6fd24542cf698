"""``Transport``: how buckets of weights get from the trainer to the workers, over the network or by shared memory.

Both sides alternate between two blocks of memory, so that one is filled while the other is loaded. The blocks are kept
between updates, as reused memory is several times as fast as new memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed does not export its type

from rlhfkit.rollout.weight_sync.gloo import Broadcast, GlooGroup
from rlhfkit.rollout.weight_sync.shared_memory import SharedBlocks

Poll = Callable[[], None]
"""Raises if a worker has failed already."""


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
    """Broadcasts over TCP, between any machines; ``group`` has the trainer and the workers."""

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._blocks = [torch.empty(0, dtype=torch.uint8)] * 2

    def _block(self, number: int, num_bytes: int) -> Tensor:
        if self._blocks[number % 2].numel() < num_bytes:
            self._blocks[number % 2] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._blocks[number % 2][:num_bytes]

    def send_blocks(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        sending: list[Broadcast | None] = [None, None]  # the block before is being sent while one is filled
        for number, num_bytes in enumerate(sizes):
            _wait(sending[number % 2], poll)
            block = self._block(number, num_bytes)
            yield block
            sending[number % 2] = self._group.broadcast(block)
        for broadcast in sending:
            _wait(broadcast, poll)

    def receive_blocks(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        def receive(number: int) -> tuple[Tensor, Broadcast]:
            block = self._block(number, sizes[number])
            return block, self._group.broadcast(block)

        arriving = receive(0) if sizes else None  # the next block is received while one is loaded
        for number in range(len(sizes)):
            assert arriving is not None
            block, broadcast = arriving
            broadcast.wait()
            arriving = receive(number + 1) if number + 1 < len(sizes) else None
            yield block

    def close(self) -> None:
        self._group.close()


def _wait(broadcast: Broadcast | None, poll: Poll) -> None:
    """Wait for a broadcast, unless a worker has failed, which would never take part in it."""
    if broadcast is None:
        return
    _wait_until(broadcast.is_completed, poll)
    try:
        broadcast.wait()
    except RuntimeError:
        for _ in range(50):  # a worker's own error, if there is one, says more than "connection closed by peer"
            poll()
            time.sleep(0.1)
        raise


def _wait_until(ready: Callable[[], bool], poll: Poll, timeout: float | None = None) -> None:
    """Wait until ``ready`` is true and poll the workers meanwhile; TimeoutError after ``timeout`` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause, checks = 1e-5, 0
    while not ready():
        time.sleep(pause)
        pause, checks = min(2 * pause, 2e-3), checks + 1
        if checks % 100 == 0:
            poll()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"workers did not load a block of weights within {timeout:g} s")


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
            _wait_until(lambda: self._store.add(f"loaded/{before}", 0) == self._workers, poll, self._timeout)
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
