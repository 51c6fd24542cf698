"""``WeightSyncCoordinator``: rank 0's half of giving engines new weights, none of which serves half of them."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from rlhfkit.distributed import exchange_errors, gather_objects
from rlhfkit.rollout.engine import WeightInfo, WeightSource
from rlhfkit.rollout.errors import EngineError, EngineFailure
from rlhfkit.rollout.supervision.handle import EngineHandle, EngineHandles
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.supervision.health_monitor import examine
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender
from rlhfkit.rollout.weight_sync.sender import WeightSender


class WeightSyncCoordinator:
    """Transfers to the engines of one manager, over one sender.

    Args:
        manager: The engines.
        sender: Who sends.
        mendable: Whether engines whose transfer broke off can be sent weights again; else they are started again.
    """

    def __init__(self, manager: EngineManager, sender: WeightSender, *, mendable: bool) -> None:
        self._manager = manager
        self._sender = sender
        self._mendable = mendable
        self._connected: tuple[EngineHandle, ...] = ()
        self._taking_part: tuple[EngineHandle, ...] = ()  # in the last attempt

    def publish(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """One attempt: pause, begin, send, finish, resume.

        Engines are out of service from the first step to the last, and stay so if any fails. Running requests are kept,
        and continue with the new weights.

        Args:
            infos: What ``weights`` yields.
            weights: Read once.
            version: Of the weights.

        Raises:
            EngineError: If an engine died, failed, or took too long.
        """
        try:
            self._publish(infos, weights, version)
        finally:
            if isinstance(self._sender, IPCSender):
                self._sender.end()

    def _publish(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._taking_part = ()
        handles = self._handles()
        self._taking_part = handles.handles
        asleep = any(handle.asleep for handle in handles.handles)
        arrived: int | None = None
        try:
            self._prepare(handles, asleep)
            self._sender.send(handles, infos, weights)
            handles.submit("finish_update", version, doing="finishing the weight update").result()
            if asleep:
                handles.submit("wake", doing="waking up").result()
            handles.submit("resume", doing="resuming after the weight update").result()
            arrived = version
        except BaseException:
            self._connected = ()
            with contextlib.suppress(Exception):
                self._sender.close()  # workers that wait for data fail now, not when their time is up
            raise
        finally:
            self._manager.end_sync(handles, arrived)

    def _handles(self) -> EngineHandles:
        """The engines that take part; those that hold garbage and cannot be mended are replaced first."""
        broken = [handle for handle in self._manager.handles if handle.dirty and handle.state is not State.DEAD]
        if self._mendable or not broken:
            return self._manager.begin_sync()
        for handle in broken:
            self._manager.mark_dead(handle, "its last weight update broke off")
        return self._manager.begin_sync(of_all=True)

    def _prepare(self, handles: EngineHandles, asleep: bool) -> None:
        """Everything before the first byte. The first call is a roll call: whoever cannot answer is found out here."""
        if asleep:  # memory for cached keys and values is taken when the trainer has sent everything
            handles.submit("wake", ["weights"], doing="waking up").result()
        handles.submit("pause", doing="pausing for new weights").result()
        if any(handle.dirty for handle in handles.handles):
            handles.submit("abandon_update", doing="closing a broken update").result()
        if self._connected != handles.handles:
            self._sender.connect(handles)
            self._connected = handles.handles
        handles.submit("begin_update", doing="getting ready for new weights").result()

    def find_the_dead(self, error: BaseException) -> bool:
        """After an attempt has failed: whether engines died of it, and others are left or coming that can be tried.

        Args:
            error: What :meth:`publish` raised.
        """
        if isinstance(error, EngineFailure) and error.engine is not None:
            self._manager.mark_dead(error.engine, str(error))
        return examine(self._manager, self._taking_part) and not self._manager.hopeless

    def close(self) -> None:
        """Leave the group."""
        self._sender.close()


class Outcome(NamedTuple):
    """What became of one attempt to send weights, the same on every rank."""

    error: Exception | None
    touched: bool
    """Whether engines may have received something."""
    worth_another: bool
    """Whether engines died of it, so that the others can be tried again."""


def attempt_to_send(
    weights: WeightSource, version: int, sender: WeightSender | None, sync: WeightSyncCoordinator | None
) -> Outcome:
    """Send the weights once. A collective, whatever happens: every rank reads its source to the end.

    Args:
        weights: This rank's source.
        version: Of the weights.
        sender: Of a rank that takes part in sending.
        sync: On rank 0.
    """
    error: Exception | None = None
    touched = worth_another = False
    stream = iter(weights)
    try:
        first = list(itertools.islice(stream, 1))  # the source's own checks run now, before any engine is touched
        touched = True
        infos, tensors = weights.metadata(), itertools.chain(first, stream)
        if sync is not None:
            sync.publish(infos, tensors, version)
        elif isinstance(sender, IPCSender):
            sender.contribute(infos, tensors)
    except Exception as caught:
        error = caught
        worth_another = touched and sync is not None and sync.find_the_dead(caught)
    try:
        for _ in stream:  # also after a failure: the others wait in its collectives
            pass
    except Exception as caught:
        error, worth_another = error or caught, False
    error = exchange_errors(error, error_type=EngineError)
    return Outcome(error, *gather_objects((touched, worth_another))[0])
