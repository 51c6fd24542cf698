"""``Transport``: how blocks of weights get from the trainer to the workers, from and to main memory or GPUs.

Both sides alternate between two blocks of memory, so that one is filled while the other is loaded. The blocks are kept
between updates, as reused memory is several times as fast as new memory.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhfkit.rollout.weight_sync.process_group.groups import Broadcast, TransferGroup
from rlhfkit.rollout.weight_sync.process_group.rendezvous import TrainerWatch
from rlhfkit.rollout.weight_sync.process_group.waiting import Poll, wait_until

_SETTLE_SECONDS = 5.0
"""Time for a failure to become known in better words."""


class Transport:
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
        """Yield blocks to fill. A block is sent when the next one is requested; iterate to the end."""
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
        """Yield blocks as they arrive, each valid until the next one is requested."""
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
        """Disconnect; processes that wait for data fail at once."""
        self._group.close()
        self._blocks = []
