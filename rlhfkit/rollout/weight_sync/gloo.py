"""``GlooGroup``: a process group of the trainer and the engines' workers that uses no global state of torch."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed does not export their types


class Broadcast:
    """A broadcast in progress."""

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Wait until it has ended; RuntimeError if a process failed, the time is up, or the group was closed."""
        if self._work is None:
            raise RuntimeError("the group was closed during a broadcast")
        self._work.wait()

    def drop(self) -> None:
        """Release the group's connections."""
        self._work = None


class GlooGroup:
    """A gloo group over its own store.

    ``prefix`` distinguishes it from earlier groups with the same store; ``timeout`` is in seconds per broadcast;
    ``address`` is this machine's, as the others reach it.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, timeout: float, address: str) -> None:
        self._timeout = timedelta(seconds=timeout)
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._timeout = self._timeout
        options._threads = 2
        options._devices = [gloo.create_device(hostname=address)]
        self._group: Any = gloo(PrefixStore(prefix, store), rank, size, options)
        self._in_progress: list[Broadcast] = []

    def broadcast(self, block: Tensor) -> Broadcast:
        """Start to send (rank 0) or receive a contiguous CPU tensor, which must not be used before the end."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        broadcast = Broadcast(self._group.broadcast([block], options))
        self._in_progress = [*(other for other in self._in_progress if not other.is_completed()), broadcast]
        return broadcast

    def close(self) -> None:
        """Close all connections, so that processes that wait for this one fail at once."""
        # In torch 2.13 abort() and shutdown() leave the sockets of a gloo group open. They are closed when nothing
        # refers to the group any more; the Work objects of its broadcasts do.
        for broadcast in self._in_progress:
            broadcast.drop()
        self._in_progress, self._group = [], None


def open_store(address: str, timeout: float) -> TCPStore:
    """Open a store on a free port of one local address; ``timeout`` is in seconds per operation."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to a host, without sending anything."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
