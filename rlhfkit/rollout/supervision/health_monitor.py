"""Asking engines whether they live: now and then by a thread, and at once after something has failed."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.handle import EngineHandle, fetch
from rlhfkit.rollout.supervision.health import HealthPolicy, State

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25


class Watched(Protocol):
    """What watching needs of a :class:`~rlhfkit.rollout.supervision.manager.EngineManager`."""

    policy: HealthPolicy

    @property
    def handles(self) -> list[EngineHandle]:
        """The engines."""
        ...

    def is_up(self, handle: EngineHandle, info: dict[str, Any]) -> None:
        """An engine has started."""
        ...

    def mark_dead(self, handle: EngineHandle, reason: str) -> None:
        """An engine has died."""
        ...


def watch(fleet_reference: "ref[Watched]", closed: threading.Event) -> None:
    """Body of the watching thread; it ends with the manager.

    Args:
        fleet_reference: The manager, not kept alive.
        closed: Set when there is nothing to watch any more.
    """
    before = time.monotonic()
    while not closed.wait(_TICK_SECONDS):
        manager, now = fleet_reference(), time.monotonic()
        if manager is None:
            return
        if now - before > 4 * _TICK_SECONDS:  # this process itself stood still: nobody's answer could be seen
            for handle in manager.handles:
                handle.probes.excuse(now - before)
        before = now
        try:
            watch_once(manager, now)
        except Exception:
            if closed.is_set():
                return
            log.exception("watching the engines failed; it goes on")
        del manager


def watch_once(manager: Watched, now: float) -> None:
    """Take answers that have come, send questions that are due, and mark_dead who did not answer.

    Args:
        manager: The engines.
        now: Seconds, monotonic.
    """
    for handle in manager.handles:
        if handle.state is State.DEAD:
            continue
        if handle.state is State.STARTING:
            _watch_start(manager, handle, now)
        elif handle.probe is not None:
            if _is_ready(handle.probe):
                answer, handle.probe = handle.probe, None
                _take_answer(manager, handle, answer)
            elif handle.probes.dead(now):
                manager.mark_dead(handle, f"it did not answer for {now - handle.probes.last_answer:.0f} s")
        elif handle.probes.due(now):
            handle.probe = handle.actor.health.remote()
            handle.probes.asked(now)


def examine(manager: Watched, handles: Sequence[EngineHandle]) -> bool:
    """Ask engines at once whether they live, after something has failed.

    Args:
        manager: Theirs.
        handles: The engines.

    Returns:
        Whether some are dead now.
    """
    import ray

    limit = manager.policy.probe_timeout * manager.policy.probe_failures
    up = [handle for handle in handles if handle.state not in (State.DEAD, State.STARTING)]
    asked = {handle.actor.health.remote(): handle for handle in up}
    if asked:
        ray.wait(list(asked), num_returns=len(asked), timeout=limit)
    for answer, handle in asked.items():
        if _is_ready(answer):
            _take_answer(manager, handle, answer)
        else:
            manager.mark_dead(handle, f"it did not answer for {limit:g} s")
    return any(handle.state is State.DEAD for handle in handles)


def _watch_start(manager: Watched, handle: EngineHandle, now: float) -> None:
    if _is_ready(handle.started):
        try:
            info = fetch(handle.started, handle, "starting again")
        except EngineError as error:
            manager.mark_dead(handle, str(error))
        else:
            log.info("%s is up again and gets weights with the next sync", handle)
            manager.is_up(handle, info)
    elif now > handle.start_by:
        manager.mark_dead(handle, "it took too long to start")


def _take_answer(manager: Watched, handle: EngineHandle, answer: Any) -> None:
    try:
        health = fetch(answer, handle, "being asked whether it lives")
    except EngineError as error:
        manager.mark_dead(handle, str(error))
        return
    handle.probes.answered(time.monotonic())
    handle.silent, handle.paused = health["silent"], health["paused"]
    if handle.silent > manager.policy.silence_timeout:
        manager.mark_dead(handle, f"its model has not made a step for {handle.silent:.0f} s")


def _is_ready(answer: Any) -> bool:
    import ray

    return bool(ray.wait([answer], timeout=0)[0])
