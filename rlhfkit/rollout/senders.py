"""The trainer's half of a weight transfer: what any has, and ``GlooSender`` for CPUs.

Rank 0 of the training is rank 0 of a group of its own whose other members are the engines' workers. The group touches
no global state of ``torch.distributed``. One remote call announces all names, types and shapes; the bytes follow as
broadcasts, one per bucket.
"""

import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
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


class Broadcast:
    """A broadcast under way."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: If a member failed, the time is up, or the group was closed.
        """
        if self._work is None:
            raise RuntimeError("the group was closed during a broadcast")
        self._work.wait()

    def drop(self) -> None:
        """Let go of the group's connections."""
        self._work = None


class GlooGroup:
    """A gloo group over its own store.

    Args:
        store: Shared key-value store.
        prefix: Distinguishes this group from earlier ones over the same store.
        rank: Of this process.
        size: Members.
        timeout: Seconds any operation may take.
        address: Address of this machine that the others reach.
    """

    def __init__(self, store: dist.Store, prefix: str, rank: int, size: int, timeout: float, address: str) -> None:
        self._timeout = timedelta(seconds=timeout)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave most of it out
        options = gloo._Options()
        options._timeout = self._timeout
        options._threads = 2
        options._devices = [gloo.create_device(hostname=address)]
        self._group: Any = gloo(dist.PrefixStore(prefix, store), rank, size, options)
        self._under_way: list[Broadcast] = []

    def broadcast(self, block: Tensor) -> Broadcast:
        """Start sending from (or receiving into) the block; rank 0 sends.

        Args:
            block: Contiguous CPU tensor, untouched until the work is done.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        broadcast = Broadcast(self._group.broadcast([block], options))
        self._under_way = [*(other for other in self._under_way if not other.is_completed()), broadcast]
        return broadcast

    def close(self) -> None:
        """Drop all connections, so that members that wait for this one fail now.

        In torch 2.13 ``abort`` and ``shutdown`` leave the sockets of a gloo group open; they are closed when nothing
        refers to the group any more, and a piece of its work does.
        """
        for broadcast in self._under_way:
            broadcast.drop()
        self._under_way, self._group = [], None


class GlooSender:
    """Broadcasts buckets over TCP; two are in flight while the next is filled.

    Args:
        timeout: Seconds any one bucket, and the rendezvous, may take.
        bucket_bytes: Size of a bucket.
    """

    backend = "gloo"
    recoverable = True

    def __init__(self, *, timeout: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self._store: dist.TCPStore | None = None
        self._group: GlooGroup | None = None
        self._generation = 0  # groups formed so far; the prefix of the keys of each
        self._blocks: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def connect(self, receivers: Receivers) -> None:
        """Form the group; see :class:`WeightSender`."""
        self.close()
        if self._store is None:
            self._store = open_store(receivers.address, self.timeout)
        self._generation += 1
        prefix, size = f"weights{self._generation}", 1 + receivers.num_workers
        pending = receivers.connect(
            {
                "address": receivers.address,
                "port": self._store.port,
                "prefix": prefix,
                "world_size": size,
                "bucket_bytes": self.bucket_bytes,
                "timeout": self.timeout,
            }
        )
        self._group = GlooGroup(self._store, prefix, 0, size, self.timeout, receivers.address)
        pending.result()

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send; see :class:`WeightSender`."""
        if self._group is None:
            raise RuntimeError("GlooSender.send was called before connect")
        pending = receivers.update(
            {
                "names": [info.name for info in infos],
                "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
                "shapes": [list(info.shape) for info in infos],
            }
        )
        works: list[Broadcast | None] = [None, None]
        stream = checked(infos, weights)
        for number, bucket in enumerate(plan_buckets(infos, self.bucket_bytes)):
            slot = number % 2
            _wait(works[slot], pending)
            if self._blocks[slot].numel() < bucket.num_bytes:
                self._blocks[slot] = torch.empty(max(bucket.num_bytes, self.bucket_bytes), dtype=torch.uint8)
            block = self._blocks[slot][: bucket.num_bytes]
            for _, view in bucket.views(block, infos):
                view.copy_(next(stream)[1])
            works[slot] = self._group.broadcast(block)
        for work in works:
            _wait(work, pending)
        next(stream, None)  # lets the source finish, and raises if there is more than was announced
        pending.result()

    def close(self) -> None:
        """Leave the group; see :class:`WeightSender`."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _wait(work: Broadcast | None, pending: Pending) -> None:
    """Wait for a broadcast, but not for a receiver that has failed and will never read it."""
    if work is None:
        return
    pause, checks = 1e-5, 0
    while not work.is_completed():
        time.sleep(pause)
        pause, checks = min(2 * pause, 2e-3), checks + 1
        if checks % 100 == 0:
            pending.poll()
    try:
        work.wait()
    except RuntimeError:
        for _ in range(50):  # the error of a receiver says more than "connection closed by peer", if one comes
            pending.poll()
            time.sleep(0.1)
        raise


def open_store(address: str, timeout: float) -> dist.TCPStore:
    """A store that listens on one address only, on a port that is free.

    Args:
        address: Of this machine.
        timeout: Seconds any operation may take.
    """
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def address_towards(host: str, port: int) -> str:
    """This machine's address on the route to a host; nothing is sent.

    Args:
        host: Name or address.
        port: Any.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
