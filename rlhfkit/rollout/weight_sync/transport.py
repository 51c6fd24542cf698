"""How buckets of weights get from the trainer to the workers: over the network, or through shared memory.

Both ends take turns with two blocks of memory, so that one is filled while the other is loaded. Blocks are kept from
bucket to bucket and from update to update: memory that was touched before is several times as fast as new memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.rollout.weight_sync.gloo import Broadcast, GlooGroup
from rlhfkit.rollout.weight_sync.shared_memory import SharedBlocks

Poll = Callable[[], None]
"""Raises if a worker has failed already."""


class Transport(Protocol):
    """One way for bytes to travel; the same kind at both ends."""

    def outgoing(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        """Blocks to fill, one after the other. A block is sent when the next is drawn; draw to the end."""
        ...

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Blocks as they arrive, each valid until the next is drawn."""
        ...

    def close(self) -> None:
        """Leave; whoever waits for data from here fails at once."""
        ...


class NetworkCarrier:
    """Broadcasts over TCP, between any machines.

    Args:
        group: Trainer and workers.
    """

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._blocks = [torch.empty(0, dtype=torch.uint8)] * 2

    def _block(self, turn: int, num_bytes: int) -> Tensor:
        if self._blocks[turn % 2].numel() < num_bytes:
            self._blocks[turn % 2] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._blocks[turn % 2][:num_bytes]

    def outgoing(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        """See :class:`Transport`; the block before is under way while one is filled."""
        under_way: list[Broadcast | None] = [None, None]
        for turn, num_bytes in enumerate(sizes):
            _wait(under_way[turn % 2], poll)
            block = self._block(turn, num_bytes)
            yield block
            under_way[turn % 2] = self._group.broadcast(block)
        for broadcast in under_way:
            _wait(broadcast, poll)

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See :class:`Transport`; the next block is being received while one is loaded."""

        def receive(turn: int) -> tuple[Tensor, Broadcast]:
            block = self._block(turn, sizes[turn])
            return block, self._group.broadcast(block)

        arriving = receive(0) if sizes else None
        for turn in range(len(sizes)):
            assert arriving is not None
            block, broadcast = arriving
            broadcast.wait()
            arriving = receive(turn + 1) if turn + 1 < len(sizes) else None
            yield block

    def close(self) -> None:
        """See :class:`Transport`."""
        self._group.close()


def _wait(broadcast: Broadcast | None, poll: Poll) -> None:
    """Wait for a broadcast, but not for a worker that has failed and will never take part in it."""
    if broadcast is None:
        return
    _until(broadcast.is_completed, poll)
    try:
        broadcast.wait()
    except RuntimeError:
        for _ in range(50):  # the error of a worker says more than "connection closed by peer", if one comes
            poll()
            time.sleep(0.1)
        raise


def _until(ready: Callable[[], bool], poll: Poll, timeout: float | None = None) -> None:
    """Ask again and again, ever less often, and sometimes look after the workers.

    Raises:
        TimeoutError: After ``timeout`` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    pause, checks = 1e-5, 0
    while not ready():
        time.sleep(pause)
        pause, checks = min(2 * pause, 2e-3), checks + 1
        if checks % 100 == 0:
            poll()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"workers did not load a block of weights within {timeout:g} s")


class SharedMemoryCarrier:
    """Blocks that all processes of one machine see; a key-value store only says which are filled and which are loaded.

    What does not fit into a block travels in several turns.

    Args:
        store: Shared by the trainer and the workers; what it is asked for comes within its time limit, or not at all.
        blocks: The memory.
        workers: How many load.
        timeout: Seconds that loading a block may take.
    """

    def __init__(self, store: dist.Store, blocks: SharedBlocks, workers: int, timeout: float) -> None:
        self._store = store
        self._blocks = blocks
        self._workers = workers
        self._timeout = timeout
        self._turn = 0  # the next one, counted over all updates, the same at both ends
        self._sends = False

    def _fill(self, num_bytes: int, poll: Poll) -> Tensor:
        """The next block to fill, when all workers have loaded what was in it."""
        before = self._turn - 2
        if before >= 0:
            _until(lambda: self._store.add(f"loaded/{before}", 0) == self._workers, poll, self._timeout)
            self._store.delete_key(f"loaded/{before}")
            self._store.delete_key(f"filled/{before}")
        return self._blocks.block(self._turn)[:num_bytes]

    def _filled(self) -> None:
        self._store.set(f"filled/{self._turn}", "yes")
        self._turn += 1

    def outgoing(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        """See :class:`Transport`."""
        self._sends = True
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                yield self._fill(num_bytes, poll)
                self._filled()
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            yield whole
            for piece in whole.split(self._blocks.num_bytes):
                self._fill(piece.numel(), poll).copy_(piece)
                self._filled()

    def _load(self, num_bytes: int) -> Tensor:
        """The next block, when it is filled."""
        if self._store.get(f"filled/{self._turn}") != b"yes":
            raise RuntimeError("the trainer has given up sending weights")
        return self._blocks.block(self._turn)[:num_bytes]

    def _loaded(self) -> None:
        self._store.add(f"loaded/{self._turn}", 1)
        self._turn += 1

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See :class:`Transport`."""
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                yield self._load(num_bytes)
                self._loaded()
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            for piece in whole.split(self._blocks.num_bytes):
                piece.copy_(self._load(piece.numel()))
                self._loaded()
            yield whole

    def close(self) -> None:
        """See :class:`Transport`; a worker that leaves is the business of whoever called it."""
        if self._sends:
            self._store.set(f"filled/{self._turn}", "never")
