"""How the trainer and the engines' workers find one another: a store of the trainer's, at which all workers report.

Process groups are created only when all have reported: NCCL waits without a limit for a process that never comes.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed does not export their types

from rlhfkit.rollout.weight_sync.process_group.groups import (
    Backend,
    GlooGroup,
    NcclGroup,
    Poll,
    TransferGroup,
    call_with_limit,
    wait_until,
)
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES

_WATCH_SECONDS = 1.0
_MARGIN_SECONDS = 5.0


@dataclass
class Rendezvous:
    """Where the processes of one group meet, and how they connect; the same for all but the ``rank_offset``."""

    address: str
    """Address of the trainer's store."""
    port: int
    prefix: str
    """What distinguishes this group from earlier ones with the same store."""
    world_size: int
    """Number of processes: 1 trainer, rank 0, and the workers."""
    timeout: float
    """Seconds for the workers to report, then to connect, and for each bucket."""
    backend: Backend = "gloo"
    """``"gloo"``: blocks come to the CPU; ``"nccl"``: to the worker's GPU."""
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    rank_offset: int = 0
    """Rank of the first worker of the engine that is told."""

    @property
    def place(self) -> str:
        """Address and port, for messages."""
        return f"{self.address}:{self.port}"


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


# ---------------------------------------------------------------- the trainer


def gather_workers(store: Store, meeting: Rendezvous, poll: Poll, name_of: Callable[[int], str]) -> None:
    """Wait until all workers have reported, then tell them so.

    ``name_of`` names the worker of a rank in messages.

    Raises:
        TimeoutError: If a worker has not reported in time; names the worker, and the store's address and port.
    """
    common = PrefixStore(meeting.prefix, store)
    missing = list(range(1, meeting.world_size))

    def all_here() -> bool:
        missing[:] = [rank for rank in missing if not common.check([f"reported/{rank}"])]
        return not missing

    def late() -> str:
        names = ", ".join(dict.fromkeys(map(name_of, missing)))
        return (
            f"{names} did not report to the trainer at {meeting.place} within {meeting.timeout:g} s (sync_timeout) "
            "for a weight transfer: stopped, overloaded, or a firewall between the machines keeps it from this port"
        )

    try:
        wait_until(all_here, poll, meeting.timeout, late)
    except BaseException:
        common.set("all reported", "no")  # the others must not wait for their own time limit
        raise
    common.set("all reported", "yes")


def announce_leave(store: Store, prefix: str) -> None:
    """Tell the workers of a group that the trainer has left it."""
    PrefixStore(prefix, store).set("left", "")


# ---------------------------------------------------------------- the workers


def report(meeting: Rendezvous, rank: int) -> TCPStore:
    """Report to the trainer, wait until all workers have, and return the trainer's store.

    Raises:
        RuntimeError: If the store cannot be reached, or some worker has not reported in time.
    """
    limit = timedelta(seconds=meeting.timeout)
    try:
        store = TCPStore(meeting.address, meeting.port, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise RuntimeError(
            f"cannot reach the trainer at {meeting.place} within {meeting.timeout:g} s for a weight transfer: is there "
            f"a firewall between the machines? {_first_line(error)}"
        ) from error
    common = PrefixStore(meeting.prefix, store)
    common.set(f"reported/{rank}", "")
    try:
        # Longer than the trainer waits, which says who is missing.
        common.wait(["all reported"], timedelta(seconds=meeting.timeout + _MARGIN_SECONDS))
        all_reported = common.get("all reported") == b"yes"
    except RuntimeError as error:
        raise RuntimeError(f"the trainer at {meeting.place} did not begin a transfer: {_first_line(error)}") from error
    if not all_reported:
        raise RuntimeError(f"the trainer at {meeting.place} has given up waiting for other workers")
    return store


class TrainerWatch:
    """Asks the store once a second, as a context, whether the trainer has left; NCCL does not notice it.

    The context is entered anew for each update.
    In a thread of its own, because the question itself may hang when the trainer's machine is gone.
    """

    def __init__(self, store: Store, meeting: Rendezvous) -> None:
        self._store = PrefixStore(meeting.prefix, store)
        self._meeting = meeting
        self._ended = threading.Event()
        self._reason: str | None = None

    def __enter__(self) -> "TrainerWatch":
        self._ended = threading.Event()
        threading.Thread(target=self._watch, args=(self._ended,), name="trainer watch", daemon=True).start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self._ended.set()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_WATCH_SECONDS):
            try:
                if self._store.check(["left"]):
                    self._reason = "has given up sending weights"
            except RuntimeError as error:
                self._reason = f"is gone ({_first_line(error)})"
            if self._reason is not None:
                return

    def poll(self) -> None:
        """Raise RuntimeError if the trainer has left."""
        if self._reason is not None:
            raise RuntimeError(f"the trainer at {self._meeting.place} {self._reason}")


# ---------------------------------------------------------------- both


def connect(store: Store, meeting: Rendezvous, rank: int, device: torch.device, poll: Poll) -> TransferGroup:
    """Create the group and connect it, after :func:`gather_workers` and :func:`report`; ``device`` is this process's.

    Raises:
        TimeoutError: If that takes too long.
        Exception: That of ``poll``.
    """
    prefix, size = f"{meeting.prefix}/{meeting.backend}", meeting.world_size
    group: TransferGroup
    if meeting.backend == "gloo":
        address = meeting.address if rank == 0 else address_towards(meeting.address, meeting.port)
        group = GlooGroup(store, prefix, rank, size, meeting.timeout, address)
    else:
        group = NcclGroup(store, prefix, rank, size, meeting.timeout, device)

    def late() -> str:
        nccl = "; NCCL_SOCKET_IFNAME chooses NCCL's interface, NCCL_DEBUG=INFO shows it"
        return (
            f"all workers reported to the trainer at {meeting.place}, but {meeting.backend} did not connect them "
            f"within {meeting.timeout:g} s (sync_timeout): a firewall between the machines must allow all ports"
            f"{nccl if meeting.backend == 'nccl' else ''}"
        )

    try:
        call_with_limit(group.connect, poll, meeting.timeout, late)
    except BaseException:
        group.close()
        raise
    return group


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
