"""Process groups of the trainer and the engines' workers, which use no global state of torch: gloo and NCCL.

Everything else of a transfer is the same for both. ``NcclGroup`` is not run on a GPU yet (docs/dev/gpus.md).
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed does not export their types

from rlhfkit.rank_store import call_in_thread

Backend = Literal["gloo", "nccl"]

_MARGIN_SECONDS = 1.0
"""The backends' own limits come after those of ``waiting.py``, whose messages say more. gloo is closed only then."""
_ABORT_SECONDS = 10.0
_CLOSED = "the group for the weight transfer was closed"


class Broadcast(Protocol):
    """A broadcast in progress."""

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed."""
        ...

    def wait(self) -> None:
        """Wait until it has ended; RuntimeError if a process failed, the time is up, or the group was closed."""
        ...


class TransferGroup(Protocol):
    """A group whose rank 0 is the trainer; all but :meth:`connect` return at once.

    Args:
        store: Store that all processes have.
        prefix: Distinguishes the group from earlier ones with the same store.
        rank: 0 for the trainer.
        size: Number of processes.
        timeout: Seconds per broadcast.
    """

    device: torch.device
    """Where blocks must be."""

    def connect(self) -> None:
        """Connect to the others, who call it at the same time. It may block for ever if one does not; RuntimeError if
        it fails or :meth:`close` was called meanwhile.
        """
        ...

    def broadcast(self, block: Tensor) -> Broadcast:
        """Start to send (rank 0) or receive a contiguous tensor, after what the current stream does with it now.

        It must not be used before the end.
        """
        ...

    def close(self) -> None:
        """Leave, in any state; whatever still waits for data fails."""
        ...


# ---------------------------------------------------------------- gloo


class _GlooBroadcast:
    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work
        self._succeeded = False

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._succeeded = True
            self.drop()
        if not self._succeeded:
            raise RuntimeError(_CLOSED)

    def drop(self) -> None:
        """Release the group's connections."""
        self._work = None


class GlooGroup:
    """A gloo group, for blocks on the CPU; ``address`` is this machine's, as the others reach it."""

    device = torch.device("cpu")

    def __init__(self, store: Store, prefix: str, rank: int, size: int, timeout: float, address: str) -> None:
        self._timeout = timedelta(seconds=timeout + _MARGIN_SECONDS)
        self._arguments = (PrefixStore(prefix, store), rank, size)
        self._address = address
        self._group: Any = None
        self._closed = False
        self._in_progress: list[_GlooBroadcast] = []

    def connect(self) -> None:
        """Connect to the others; RuntimeError if one does not come within the time limit."""
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of it
        options = gloo._Options()
        options._timeout = self._timeout
        options._threads = 2
        options._devices = [gloo.create_device(hostname=self._address)]
        group = gloo(*self._arguments, options)
        if self._closed:
            raise RuntimeError(_CLOSED)
        self._group = group

    def broadcast(self, block: Tensor) -> Broadcast:
        if self._group is None:
            raise RuntimeError(_CLOSED)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        broadcast = _GlooBroadcast(self._group.broadcast([block], options))
        self._in_progress = [*(other for other in self._in_progress if not other.is_completed()), broadcast]
        return broadcast

    def close(self) -> None:
        """Close all connections, so that processes that wait for this one fail at once."""
        # In torch 2.13 abort() and shutdown() leave the sockets of a gloo group open. They are closed when nothing
        # refers to the group any more; the Work objects of its broadcasts do.
        for broadcast in self._in_progress:
            broadcast.drop()
        self._in_progress, self._group, self._closed = [], None, True


# ---------------------------------------------------------------- NCCL


class _NcclBroadcast:
    def __init__(self, group: "NcclGroup", work: dist.Work, done: Any) -> None:
        self._group = group
        self._work = work  # keeps the tensor from being freed
        self._done = done

    def is_completed(self) -> bool:
        return bool(self._done.query()) or self._group.error is not None

    def wait(self) -> None:
        self._done.synchronize()  # callers with a time limit come when it is completed
        error = self._group.error
        if error is not None:
            raise RuntimeError(f"NCCL failed in a broadcast of weights: {error}")


class NcclGroup:
    """An NCCL group, for blocks on this process's GPU ``device``.

    NCCL works on streams of its own; the current stream is left as it was.
    """

    def __init__(self, store: Store, prefix: str, rank: int, size: int, timeout: float, device: torch.device) -> None:
        self.device = device
        self._timeout = timedelta(seconds=timeout + _MARGIN_SECONDS)
        nccl: Any = dist.ProcessGroupNCCL  # exists in torch's GPU builds only
        options = nccl.Options()
        options._timeout = self._timeout
        options.group_name = prefix
        with torch.cuda.device(device), _environment(_NCCL_ENVIRONMENT):
            cuda: Any = torch.cuda  # has no types
            self._stream = cuda.Stream(device)
            self._group: Any = nccl(PrefixStore(prefix, store), rank, size, options)

    def connect(self) -> None:
        """Connect to the others by a first broadcast: NCCL opens its connections only then."""
        with torch.cuda.device(self.device):  # each thread has its own current device
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device)).wait()

    @property
    def error(self) -> str | None:
        """What NCCL, or torch's thread that watches it, has found; ``None``: nothing."""
        group = self._group
        if group is None:
            return _CLOSED
        get_error = getattr(group, "get_error", None)  # torch 2.13 has it; without it time limits end what hangs
        error = None if get_error is None else get_error()
        return None if error is None or error.name == "SUCCESS" else str(error.name)

    def broadcast(self, block: Tensor) -> Broadcast:
        group = self._group
        if group is None:
            raise RuntimeError(_CLOSED)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        options.asyncOp = True  # on a stream of NCCL's own
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # the current stream is the same before and after
            work = group.broadcast([block], options)
            work.wait()  # has this stream wait, not this process
            cuda: Any = torch.cuda  # has no types
            done = cuda.Event()
            done.record(self._stream)
        return _NcclBroadcast(self, work, done)

    def close(self) -> None:
        """Abort the communicator, which frees it and ends kernels that wait for other processes."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):  # it was broken already
                call_with_limit(group.abort, lambda: None, _ABORT_SECONDS, lambda: "NCCL does not end")


_NCCL_ENVIRONMENT = {
    # When another process dies or a time limit has passed, torch's watchdog would end this process: the trainer. Here
    # failures are found by those who wait, and the group is aborted, for which torch recommends 0 ("NoHandling").
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Else Work.wait() waits for the GPU, and nobody looks at the engines meanwhile.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which torch reads when it creates a group."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------- time limits

T = TypeVar("T")
Poll = Callable[[], None]
"""Raises if the other side has failed already."""

_POLL_SECONDS = 0.2


def wait_until(ready: Callable[[], bool], poll: Poll, timeout: float, late: Callable[[], str]) -> None:
    """Wait until ``ready`` is true, calling ``poll`` meanwhile.

    Raises:
        TimeoutError: With the message ``late()``, after ``timeout`` seconds.
        Exception: That of ``poll``.
    """
    now = time.monotonic()
    deadline, next_poll = now + timeout, now + _POLL_SECONDS
    pause = 1e-5  # doubled each time: at most as long as was waited already, so short waits stay short
    while not ready():
        time.sleep(pause)
        pause, now = min(2 * pause, 2e-3), time.monotonic()
        if now >= next_poll:
            next_poll = now + _POLL_SECONDS
            poll()
            if now > deadline and not ready():
                raise TimeoutError(late())


def call_with_limit(step: Callable[[], T], poll: Poll, timeout: float, late: Callable[[], str]) -> T:
    """Return the result of a call that cannot be interrupted; raises as :func:`wait_until`, and what the call raises.

    It is made in a thread of its own, where it is left behind if it is too late.
    """
    called = call_in_thread(step, "weight transfer")
    wait_until(called.done, poll, timeout, late)
    return called.result()
