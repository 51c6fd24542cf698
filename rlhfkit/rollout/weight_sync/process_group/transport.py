"""``Transport``: how blocks of weights get from the trainer to the workers, from and to main memory or GPUs.

Both sides alternate between two blocks of memory, so that one is filled while the other is loaded. The blocks are kept
between updates, as reused memory is several times as fast as new memory.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhfkit.rollout.weight_sync.process_group.groups import Broadcast, Poll, TransferGroup, wait_until
from rlhfkit.rollout.weight_sync.process_group.rendezvous import TrainerWatch

_SETTLE_SECONDS = 5.0
"""Time for a failure to become known in better words."""


class Transport:
    """Broadcasts in a process group, between any machines: gloo from and to the CPU, NCCL from GPU to GPU.

    A block of more than ``bucket_bytes`` travels in pieces of that size. The sender has two pieces of it in memory; the
    receiver has the whole, in memory of its own, beside no other block.

    Args:
        group: The connected group.
        bucket_bytes: Bytes of a broadcast at most; the same on both sides.
        timeout: Seconds for each broadcast.
        watch: Looks after the trainer while a worker waits.
    """

    def __init__(
        self, group: TransferGroup, bucket_bytes: int, timeout: float, watch: TrainerWatch | None = None
    ) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._watch = watch
        self._blocks: list[Tensor] = []

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._group.device)

    def _block(self, number: int, num_bytes: int) -> Tensor:
        if not self._blocks:
            self._blocks = [self._allocate(0)] * 2
        if self._blocks[number % 2].numel() < num_bytes:
            self._blocks[number % 2] = self._allocate(0)  # the old one is freed first
            self._blocks[number % 2] = self._allocate(num_bytes)
        return self._blocks[number % 2][:num_bytes]

    def _release(self) -> None:
        """Keep main memory, as new memory is slower, and return a GPU's to torch's cache, for the next step's use."""
        if self._group.device.type != "cpu":
            self._blocks = []

    def _pieces(self, num_bytes: int) -> list[int]:
        """Bytes of each piece of a block."""
        full, rest = divmod(num_bytes, self._bucket_bytes)
        return [self._bucket_bytes] * full + [rest] * (rest > 0 or full == 0)

    def send_blocks(self, sizes: Sequence[int], poll: Poll) -> Iterator[Tensor]:
        """Yield the pieces of all blocks to fill, in order. One is sent when the next is requested; go to the end."""
        pieces = [piece for size in sizes for piece in self._pieces(size)]
        sending: list[Broadcast | None] = [None, None]  # the piece before is being sent while one is filled
        for number, num_bytes in enumerate(pieces):
            self._wait(
                sending[number % 2], poll, f"block {number - 1} of {len(pieces)} was not received by all workers"
            )
            block = self._block(number, num_bytes)
            yield block
            sending[number % 2] = self._group.broadcast(block)
        for number in (len(pieces), len(pieces) + 1):
            self._wait(
                sending[number % 2], poll, f"block {number - 1} of {len(pieces)} was not received by all workers"
            )
        self._release()

    def receive_blocks(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield blocks as they arrive; one of at most ``bucket_bytes`` is valid until the next one is requested."""
        if self._watch is None:
            raise RuntimeError("a transport that receives needs a TrainerWatch")
        with self._watch as watch:
            # The next block is received while one is loaded. NCCL waits for the loading of the one before it, which
            # had the same memory, because the current stream has it in its queue.
            arriving: tuple[Tensor, list[Broadcast]] | None = None
            for number, size in enumerate(sizes):
                block, broadcasts = arriving or self._receive(number, size)
                arriving = None
                while broadcasts:
                    late = f"block {number + 1} of {len(sizes)} did not come from the trainer"
                    self._wait(broadcasts.pop(0), watch.poll, late)
                if number + 1 < len(sizes) and max(sizes[number : number + 2]) <= self._bucket_bytes:
                    arriving = self._receive(number + 1, sizes[number + 1])
                yield block
                del block  # a large one is freed before there is the next
        self._release()

    def _receive(self, number: int, num_bytes: int) -> tuple[Tensor, list[Broadcast]]:
        if num_bytes > self._bucket_bytes:
            self._blocks = []
            block = self._allocate(num_bytes)
        else:
            block = self._block(number, num_bytes)
        return block, [self._group.broadcast(piece) for piece in torch.split(block, self._bucket_bytes)]

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
        """Disconnect; processes that wait for data fail at once."""
        self._group.close()
        self._blocks = []
