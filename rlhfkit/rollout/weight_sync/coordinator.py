"""Which way weights take to engines, and rank 0's steps of a sync, so that no engine serves partly updated weights."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, cast, get_args

from torch import Tensor

from rlhfkit.distributed import exchange_errors, gather_objects
from rlhfkit.rollout.engine import WeightInfo, WeightSource
from rlhfkit.rollout.errors import EngineError, EngineFailure
from rlhfkit.rollout.supervision.engines import Engine, Engines
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender
from rlhfkit.rollout.weight_sync.process_group.groups import Backend
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender
from rlhfkit.rollout.weight_sync.sender import Receivers, WeightSender
from rlhfkit.rollout.weight_sync.source import ADAPTER_SETTINGS, DEFAULT_BUCKET_BYTES, GPU_BUCKET_BYTES

Transfer = Literal["auto", "gloo", "nccl", "ipc"]


def check_transfer(transfer: str, *, device: str | None, colocate: bool) -> Transfer:
    """Return the transfer; ValueError if it is unknown or impossible on this device or beside the ranks.

    ``device``: ``"cpu"``, ``"cuda"`` or, if not known yet, ``None``.
    """
    if transfer not in get_args(Transfer):
        allowed = ", ".join(map(repr, get_args(Transfer)))
        raise ValueError(f"transfer must be one of {allowed}, got {transfer!r}")
    if transfer in ("nccl", "ipc") and device == "cpu":
        raise ValueError(
            f"transfer={transfer!r} sends from GPU to GPU, and the engines are on CPUs: use 'auto' or 'gloo'"
        )
    if transfer == "ipc" and not colocate:
        raise ValueError(
            "transfer='ipc' passes handles to memory of a GPU that engine and rank share: it needs colocate=True; use "
            "'auto' or 'nccl' for engines with GPUs of their own"
        )
    if transfer == "nccl" and colocate:
        raise ValueError(
            "transfer='nccl' cannot connect two processes on one GPU, which colocate=True means: use 'auto', "
            "'ipc', or 'gloo' (through main memory)"
        )
    return cast(Transfer, transfer)


def resolve_transfer(transfer: Transfer, *, device: str, colocate: bool) -> Transfer:
    """Return the transfer that ``"auto"`` stands for: gloo on CPUs, IPC when colocated, else NCCL.

    Raises ValueError as :func:`check_transfer` for a device that was not known before.
    """
    check_transfer(transfer, device=device, colocate=colocate)
    if transfer != "auto":
        return transfer
    if device == "cpu":
        return "gloo"
    return "ipc" if colocate else "nccl"


def make_sender(transfer: Transfer, *, timeout: float, bucket_bytes: int | None) -> WeightSender:
    """Return the sender of a resolved transfer.

    Args:
        transfer: As :func:`resolve_transfer` returns it.
        timeout: Seconds for each step.
        bucket_bytes: Bytes of a bucket; ``None``: 64 MiB through main memory, 512 MiB between GPUs.
    """
    if bucket_bytes is None:
        bucket_bytes = DEFAULT_BUCKET_BYTES if transfer == "gloo" else GPU_BUCKET_BYTES
    if transfer == "ipc":
        return IPCSender(bucket_bytes=bucket_bytes)
    backend: Backend = "nccl" if transfer == "nccl" else "gloo"
    return ProcessGroupSender(backend, timeout=timeout, bucket_bytes=bucket_bytes)


# ---------------------------------------------------------------- the steps


class BaseNeededError(EngineError):
    """An adapter was to be sent alone to an engine that lacks the weights under it."""


class SyncSteps:
    """Rank 0's steps of a weight sync, of engines and of servers alike; a subclass implements :meth:`sync`."""

    def __init__(self, sender: WeightSender) -> None:
        self._sender = sender
        self._connected: object = None  # whom the sender is connected to

    def sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Make one attempt; EngineError if an engine fails."""
        raise NotImplementedError

    def can_retry(self, error: BaseException) -> bool:
        """Whether the sync that raised ``error`` may succeed now; false by default."""
        return False

    @contextlib.contextmanager
    def paused(self, receivers: Receivers, members: object, *, broken: bool, resume: bool) -> Iterator[None]:
        """A context in which engines are paused and ready for new weights, which the sender is connected to.

        Requests in flight are kept, and continue with the new weights. After an error they stay out of service.

        Args:
            receivers: The engines.
            members: Equal if they are those of the last transfer, whose connection is used again.
            broken: Whether the last update of some broke off.
            resume: Go on at the end.
        """
        try:
            receivers.submit("pause", doing="pausing for new weights").result()
            if broken:
                self.abandon(receivers)
            if self._connected != members:
                self._connected = None
                self._sender.connect(receivers)
                self._connected = members
            receivers.submit("begin_update", doing="preparing for new weights").result()
            yield
            if resume:
                receivers.submit("resume", doing="resuming after the weight update").result()
        except BaseException:
            self._connected = None
            with contextlib.suppress(Exception):
                self._sender.close()  # workers that wait for data fail now, not at their time limit
            raise

    def abandon(self, receivers: Receivers) -> None:
        """End an update that broke off."""
        receivers.submit("abandon_update", doing="closing a broken update").result()

    def close(self) -> None:
        """Disconnect."""
        self._sender.close()
        self._connected = None


class WeightSyncCoordinator(SyncSteps):
    """Sends weights to the engines of one pool.

    ``recoverable``: whether engines whose transfer broke off can be sent weights again; else they are restarted.
    """

    def __init__(self, engines: Engines, sender: WeightSender, *, recoverable: bool) -> None:
        super().__init__(sender)
        self._engines = engines
        self._recoverable = recoverable
        self._participants: tuple[Engine, ...] = ()  # of the last attempt
        self._have_base = False  # the connected engines have the weights under an adapter, unchanged

    def wait_for_engines(self) -> None:
        """Wait until an engine is up, before other ranks wait in the collectives of the weights.

        Engines with partial weights that cannot recover are restarted first. EngineError if none is up in time.
        """
        broken = [one for one in self._engines.handles if one.has_partial_weights and one.state is not State.DEAD]
        if self._recoverable:
            broken = []
        for handle in broken:
            self._engines.mark_dead(handle, "its last weight update broke off")
        self._engines.wait_until_up(wait_for_all=bool(broken))

    @property
    def needs_base(self) -> bool:
        """Whether an engine that is up lacks the weights under an adapter, so that the adapter alone is not enough."""
        return not self._have_base or self._connected != self._engines.engines_up

    def sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Make one attempt; see :meth:`SyncSteps.sync`.

        Engines that sleep allocate the memory of their weights only, and go on sleeping instead of resuming.
        Engines are out of service from the first step to the last, and stay so if any fails.
        """
        try:
            self._try_sync(infos, weights, version)
        finally:
            if isinstance(self._sender, IPCSender):
                self._sender.end()

    def _try_sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._participants = ()
        receivers = self._engines.begin_sync()
        self._participants = engines = receivers.engines
        asleep, broken = (any(getattr(one, name) for one in engines) for name in ("asleep", "has_partial_weights"))
        had_base, self._have_base = self._have_base and self._connected == engines, False
        received: int | None = None
        try:
            if asleep:  # the key-value cache is allocated by wake(), when the trainer has made room for it
                receivers.submit("wake", ["weights"], doing="waking up").result()
            with self.paused(receivers, engines, broken=broken, resume=not asleep):
                if infos[0].name == ADAPTER_SETTINGS and not had_base:
                    raise BaseNeededError("an engine came up after it was decided to send an adapter alone")
                self._sender.send(receivers, infos, weights)
                receivers.submit("finish_update", version, doing="finishing the weight update").result()
            self._have_base = any(info.name == ADAPTER_SETTINGS for info in infos)
            received = version
        finally:
            self._engines.end_sync(receivers, received, asleep=asleep)

    def can_retry(self, error: BaseException) -> bool:
        """Whether the sync that raised ``error`` may succeed now: engines died of it and others are up or starting."""
        if isinstance(error, BaseNeededError):
            return True
        if isinstance(error, EngineFailure) and error.engine is not None:
            self._engines.mark_dead(error.engine, str(error), cause=error.cause)
        return self._engines.probe_now(self._participants) and not self._engines.all_dead


class SyncAttempt(NamedTuple):
    """Outcome of one attempt to send weights, the same on every rank."""

    error: Exception | None
    started: bool
    """Whether engines may have received something."""
    can_retry: bool
    """Whether engines died of it and the weights can be sent again to the others."""


def attempt_sync(
    weights: WeightSource, version: int, sender: WeightSender | None, coordinator: SyncSteps | None
) -> SyncAttempt:
    """Send the weights once. A collective: every rank reads its source to the end, whatever fails.

    ``sender`` is ``None`` on ranks that do not send, ``coordinator`` on all ranks but 0.
    """
    error: Exception | None = None
    started = can_retry = False
    stream = iter(weights)
    try:
        first = list(itertools.islice(stream, 1))  # runs the source's own checks, before any engine is paused
        started = True
        infos, tensors = weights.metadata(), itertools.chain(first, stream)
        if coordinator is not None:
            coordinator.sync(infos, tensors, version)
        elif isinstance(sender, IPCSender):
            sender.contribute(infos, tensors)
    except Exception as caught:
        error = caught
        can_retry = started and coordinator is not None and coordinator.can_retry(caught)
    try:
        for _ in stream:  # also after a failure, as other ranks wait in its collectives
            pass
    except Exception as caught:
        error, can_retry = error or caught, False
    error = exchange_errors(error, error_type=EngineError)
    return SyncAttempt(error, *gather_objects((started, can_retry))[0])
