"""How buckets of weights get from the trainer to the workers: over the network, or through shared memory.

Both ends take turns with two blocks of memory, so that one is filled while the other is loaded. Blocks are kept from
bucket to bucket and from update to update: memory that was touched before is several times as fast as new memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhfkit.rollout.gloo_group import GlooGroup, Operation
from rlhfkit.rollout.shared_blocks import SharedBlocks

Wait = Callable[[Operation | None], None]
"""Waits for an operation, and raises when it will never end."""


class Carrier(Protocol):
    """One way for bytes to travel; the same kind at both ends."""

    def outgoing(self, sizes: Sequence[int], wait: Wait) -> Iterator[Tensor]:
        """Blocks to fill, one after the other. A block is sent when the next is drawn; draw to the end."""
        ...

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Blocks as they arrive, each valid until the next is drawn."""
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

    def outgoing(self, sizes: Sequence[int], wait: Wait) -> Iterator[Tensor]:
        """See :class:`Carrier`; the block before is under way while one is filled."""
        under_way: list[Operation | None] = [None, None]
        for turn, num_bytes in enumerate(sizes):
            wait(under_way[turn % 2])
            block = self._block(turn, num_bytes)
            yield block
            under_way[turn % 2] = self._group.broadcast(block)
        for operation in under_way:
            wait(operation)

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See :class:`Carrier`; the next block is being received while one is loaded."""

        def receive(turn: int) -> tuple[Tensor, Operation]:
            block = self._block(turn, sizes[turn])
            return block, self._group.broadcast(block)

        arriving = receive(0) if sizes else None
        for turn in range(len(sizes)):
            assert arriving is not None
            block, operation = arriving
            operation.wait()
            arriving = receive(turn + 1) if turn + 1 < len(sizes) else None
            yield block


class SharedMemoryCarrier:
    """Blocks that all processes of one machine see; the network only says when a block is ready.

    All meet once per turn: the trainer when it has filled a block, the workers when they have loaded the one before.
    What does not fit into a block travels in several turns.

    Args:
        group: Trainer and workers.
        blocks: The memory.
    """

    def __init__(self, group: GlooGroup, blocks: SharedBlocks) -> None:
        self._group = group
        self._blocks = blocks

    def outgoing(self, sizes: Sequence[int], wait: Wait) -> Iterator[Tensor]:
        """See :class:`Carrier`."""
        turn = 0
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                yield self._blocks.block(turn)[:num_bytes]
                wait(self._group.meet())
                turn += 1
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            yield whole
            for piece in whole.split(self._blocks.num_bytes):
                self._blocks.block(turn)[: piece.numel()].copy_(piece)
                wait(self._group.meet())
                turn += 1

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """See :class:`Carrier`."""
        turn = 0
        for num_bytes in sizes:
            if num_bytes <= self._blocks.num_bytes:
                self._group.meet().wait()
                yield self._blocks.block(turn)[:num_bytes]
                turn += 1
                continue
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            for piece in whole.split(self._blocks.num_bytes):
                self._group.meet().wait()
                piece.copy_(self._blocks.block(turn)[: piece.numel()])
                turn += 1
            yield whole
