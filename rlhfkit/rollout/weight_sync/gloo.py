"""``GlooGroup``: the trainer and the engines' workers as a group of their own, which touches no global state of torch.

Its store listens on one address only. Every broadcast has a time limit.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


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
            RuntimeError: If a handle failed, the time is up, or the group was closed.
        """
        if self._work is None:
            raise RuntimeError("the group was closed during an broadcast")
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
        size: EngineHandles.
        timeout: Seconds any broadcast may take.
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
        """Drop all connections, so that handles that wait for this one fail now.

        In torch 2.13 ``abort`` and ``shutdown`` leave the sockets of a gloo group open; they are closed when nothing
        refers to the group any more, and a piece of its work does.
        """
        for broadcast in self._under_way:
            broadcast.drop()
        self._under_way, self._group = [], None


def open_store(address: str, timeout: float) -> dist.TCPStore:
    """A store that listens on one address only, on a port that is free.

    Args:
        address: Of this machine.
        timeout: Seconds any broadcast may take.
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
