"""``WeightSyncCoordinator``: rank 0's steps of a weight sync, so that no engine serves partly updated weights."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from rlhfkit.distributed import exchange_errors, gather_objects
from rlhfkit.rollout.engine import WeightInfo, WeightSource
from rlhfkit.rollout.errors import EngineError, EngineFailure
from rlhfkit.rollout.supervision.calls import EngineReceivers
from rlhfkit.rollout.supervision.engines import Engine, Engines
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender
from rlhfkit.rollout.weight_sync.sender import WeightSender
from rlhfkit.rollout.weight_sync.source import ADAPTER_SETTINGS


class BaseNeededError(EngineError):
    """An adapter was to be sent alone to an engine that lacks the weights under it."""


class WeightSyncCoordinator:
    """Sends weights to the engines of one pool.

    ``recoverable``: whether engines whose transfer broke off can be sent weights again; else they are restarted.
    """

    def __init__(self, engines: Engines, sender: WeightSender, *, recoverable: bool) -> None:
        self._engines = engines
        self._sender = sender
        self._recoverable = recoverable
        self._connected: tuple[Engine, ...] = ()
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
        """Make one attempt: pause, begin the update, send, finish the update, resume; EngineError if an engine fails.

        Engines that sleep allocate the memory of their weights only, and go on sleeping instead of resuming.
        Engines are out of service from the first step to the last, and stay so if any fails. Requests in flight are
        kept, and continue with the new weights.
        """
        try:
            self._try_sync(infos, weights, version)
        finally:
            if isinstance(self._sender, IPCSender):
                self._sender.end()

    def _try_sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._participants = ()
        receivers = self._engines.begin_sync()
        self._participants = receivers.engines
        asleep = any(engine.asleep for engine in receivers.engines)
        received: int | None = None
        try:
            self._prepare(receivers, asleep)
            had_base, self._have_base = self._have_base, False
            if infos[0].name == ADAPTER_SETTINGS and not had_base:
                raise BaseNeededError("an engine came up between the decision to send an adapter alone and the sync")
            self._sender.send(receivers, infos, weights)
            self._have_base = any(info.name == ADAPTER_SETTINGS for info in infos)
            receivers.submit("finish_update", version, doing="finishing the weight update").result()
            if not asleep:
                receivers.submit("resume", doing="resuming after the weight update").result()
            received = version
        except BaseException:
            self._connected, self._have_base = (), False
            with contextlib.suppress(Exception):
                self._sender.close()  # workers that wait for data fail now, not at their time limit
            raise
        finally:
            self._engines.end_sync(receivers, received, asleep=asleep)

    def _prepare(self, receivers: EngineReceivers, asleep: bool) -> None:
        """Run every step before the first byte; the first call fails for engines that do not answer."""
        if asleep:  # the key-value cache is allocated by wake(), when the trainer has made room for it
            receivers.submit("wake", ["weights"], doing="waking up").result()
        receivers.submit("pause", doing="pausing for new weights").result()
        if any(engine.has_partial_weights for engine in receivers.engines):
            receivers.submit("abandon_update", doing="closing a broken update").result()
        if self._connected != receivers.engines:
            self._have_base = False
            self._sender.connect(receivers)
            self._connected = receivers.engines
        receivers.submit("begin_update", doing="preparing for new weights").result()

    def can_retry(self, error: BaseException) -> bool:
        """Whether the sync that raised ``error`` may succeed now: engines died of it and others are up or starting."""
        if isinstance(error, BaseNeededError):
            return True
        if isinstance(error, EngineFailure) and error.engine is not None:
            self._engines.mark_dead(error.engine, str(error), cause=error.cause)
        return self._engines.probe_now(self._participants) and not self._engines.all_dead

    def close(self) -> None:
        """Close the sender."""
        self._sender.close()


class SyncSteps(Protocol):
    """Rank 0's steps of a weight sync; :class:`WeightSyncCoordinator` has them."""

    def sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Make one attempt; EngineError if an engine fails."""
        ...

    def can_retry(self, error: BaseException) -> bool:
        """Whether another attempt may succeed now."""
        ...


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
