"""The trainer's half of a weight transfer: what any has, and ``GlooSender`` for CPUs.

Rank 0 of the training is rank 0 of a group of its own whose other members are the engines' workers. One remote call
announces all names, types and shapes; the bytes follow, bucket by bucket.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from rlhfkit.rollout.carriers import Carrier, NetworkCarrier, SharedMemoryCarrier
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.gloo_group import GlooGroup, Operation, open_store
from rlhfkit.rollout.shared_blocks import SharedBlocks
from rlhfkit.rollout.transfer import DEFAULT_BUCKET_BYTES, plan_buckets


class Pending(Protocol):
    """A remote call to several engines, under way."""

    def poll(self) -> None:
        """Raise if one of them has failed already."""
        ...

    def result(self) -> list[Any]:
        """Wait for all; raises when one fails or the time limit has passed."""
        ...


class Receivers(Protocol):
    """The engines, as a sender sees them."""

    @property
    def num_workers(self) -> int:
        """Processes that receive, over all engines."""
        ...

    @property
    def address(self) -> str:
        """Where they reach this process."""
        ...

    def connect(self, rendezvous: dict[str, Any]) -> Pending:
        """Have every worker join the group; ``rank_offset`` is added to the rendezvous per engine."""
        ...

    def update(self, update: dict[str, Any]) -> Pending:
        """Have every worker receive."""
        ...


class WeightSender(Protocol):
    """Sends the same weights to all engines."""

    backend: str
    """Name of vLLM's weight-transfer engine at the other end."""
    recoverable: bool
    """Whether engines can be sent weights again after a transfer that broke off."""

    def connect(self, receivers: Receivers) -> None:
        """Form the group."""
        ...

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send everything and wait until every worker has it."""
        ...

    def close(self) -> None:
        """Leave the group; peers that wait for data fail at once."""
        ...


def checked(infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights, each compared with what was announced, since receivers cut the bytes by the announcement.

    Raises:
        ValueError: Naming the first that differs.
    """
    count = 0
    for count, (name, tensor) in enumerate(weights, start=1):
        if count > len(infos):
            raise ValueError(f"the weight source yields {name!r} after the {len(infos)} tensors that it announced")
        expected, actual = infos[count - 1], WeightInfo(name, tuple(tensor.shape), tensor.dtype)
        if actual != expected:
            raise ValueError(f"the weight source announced {expected} and yields {actual}")
        yield name, tensor
    if count != len(infos):
        raise ValueError(f"the weight source announced {len(infos)} tensors and yields {count}")


class GlooSender:
    """Sends buckets from the CPU: through shared memory if all engines are on this machine, else over TCP.

    Args:
        timeout: Seconds any one bucket, and the rendezvous, may take.
        bucket_bytes: Size of a bucket.
        shared_memory: Use shared memory where that can be.
    """

    backend = "gloo"
    recoverable = True

    def __init__(self, *, timeout: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES, shared_memory: bool = True) -> None:
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self.shared_memory = shared_memory
        self._store: dist.TCPStore | None = None
        self._group: GlooGroup | None = None
        self._generation = 0  # groups formed so far; the prefix of the keys of each
        self._carrier: Carrier | None = None

    def connect(self, receivers: Receivers) -> None:
        """Form the group; see :class:`WeightSender`."""
        self.close()
        if self._store is None:
            self._store = open_store(receivers.address, self.timeout)
        self._generation += 1
        prefix, size = f"weights{self._generation}", 1 + receivers.num_workers
        blocks = None
        if self.shared_memory and receivers.address == "127.0.0.1":
            blocks = SharedBlocks.create(self.bucket_bytes)
        pending = receivers.connect(
            {
                "address": receivers.address,
                "port": self._store.port,
                "prefix": prefix,
                "world_size": size,
                "bucket_bytes": self.bucket_bytes,
                "timeout": self.timeout,
                "shared_memory": None if blocks is None else str(blocks.path),
            }
        )
        try:
            self._group = GlooGroup(self._store, prefix, 0, size, self.timeout, receivers.address)
            pending.result()
        finally:
            if blocks is not None:
                blocks.hide()
        self._carrier = NetworkCarrier(self._group) if blocks is None else SharedMemoryCarrier(self._group, blocks)

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send; see :class:`WeightSender`."""
        if self._carrier is None:
            raise RuntimeError("GlooSender.send was called before connect")
        pending = receivers.update(
            {
                "names": [info.name for info in infos],
                "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
                "shapes": [list(info.shape) for info in infos],
            }
        )
        stream = checked(infos, weights)
        buckets = plan_buckets(infos, self.bucket_bytes)
        blocks = self._carrier.outgoing([bucket.num_bytes for bucket in buckets], partial(_wait, pending=pending))
        for number, block in enumerate(blocks):
            for _, view in buckets[number].views(block, infos):
                view.copy_(next(stream)[1])
        next(stream, None)  # lets the source finish, and raises if there is more than was announced
        pending.result()

    def close(self) -> None:
        """Leave the group; see :class:`WeightSender`."""
        if self._group is not None:
            self._group.close()
        self._group, self._carrier = None, None


def _wait(operation: Operation | None, pending: Pending) -> None:
    """Wait for an operation, but not for a receiver that has failed and will never take part in it."""
    if operation is None:
        return
    pause, checks = 1e-5, 0
    while not operation.is_completed():
        time.sleep(pause)
        pause, checks = min(2 * pause, 2e-3), checks + 1
        if checks % 100 == 0:
            pending.poll()
    try:
        operation.wait()
    except RuntimeError:
        for _ in range(50):  # the error of a receiver says more than "connection closed by peer", if one comes
            pending.poll()
            time.sleep(0.1)
        raise
