"""Health probes of engines: periodically by a thread, and at once after something has failed."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from rlhfkit.rollout.errors import EngineFailure
from rlhfkit.rollout.supervision.handle import EngineHandle, fetch
from rlhfkit.rollout.supervision.health import HealthPolicy, State

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25


class Monitored(Protocol):
    """What the health monitor calls on an :class:`~rlhfkit.rollout.supervision.manager.EngineManager`."""

    policy: HealthPolicy

    @property
    def handles(self) -> list[EngineHandle]:
        """All engines."""
        ...

    def mark_started(self, handle: EngineHandle, info: dict[str, Any]) -> None:
        """Record that an engine has started."""
        ...

    def mark_dead(self, handle: EngineHandle, reason: str, *, cause: str = "") -> None:
        """Record that an engine has died."""
        ...


def monitor_health(manager_ref: "ref[Monitored]", closed: threading.Event) -> None:
    """Probe the engines until the manager is closed or garbage collected; the body of a thread."""
    before = time.monotonic()
    while not closed.wait(_TICK_SECONDS):
        manager, now = manager_ref(), time.monotonic()
        if manager is None:
            return
        if now - before > 4 * _TICK_SECONDS:  # this process was suspended and could not read answers
            for handle in manager.handles:
                handle.probes.discount(now - before)
        before = now
        try:
            check_engines(manager, now)
        except Exception:
            if closed.is_set():
                return
            log.exception("probing the engines failed; it is tried again")
        del manager


def check_engines(manager: Monitored, now: float) -> None:
    """Read answers that have arrived, send probes that are due, and mark engines dead that did not answer."""
    for handle in manager.handles:
        if handle.state is State.DEAD:
            continue
        if handle.state is State.STARTING:
            _check_start(manager, handle, now)
        elif handle.probe_ref is not None:
            if _is_ready(handle.probe_ref):
                answer, handle.probe_ref = handle.probe_ref, None
                _take_answer(manager, handle, answer)
            elif handle.probes.failed(now):
                manager.mark_dead(handle, f"it did not answer for {now - handle.probes.last_answer:.0f} s")
        elif handle.probes.due(now):
            handle.probe_ref = handle.actor.health.remote()
            handle.probes.sent(now)


def probe_now(manager: Monitored, handles: Sequence[EngineHandle]) -> bool:
    """Probe engines at once, after a failure; returns whether any of ``handles`` is dead."""
    import ray

    limit = manager.policy.probe_timeout * manager.policy.probe_failures
    up = [handle for handle in handles if handle.state not in (State.DEAD, State.STARTING)]
    probes = {handle.actor.health.remote(): handle for handle in up}
    if probes:
        ray.wait(list(probes), num_returns=len(probes), timeout=limit)
    for answer, handle in probes.items():
        if _is_ready(answer):
            _take_answer(manager, handle, answer)
        else:
            manager.mark_dead(handle, f"it did not answer for {limit:g} s")
    return any(handle.state is State.DEAD for handle in handles)


def _check_start(manager: Monitored, handle: EngineHandle, now: float) -> None:
    if _is_ready(handle.start_ref):
        try:
            info = fetch(handle.start_ref, handle, "starting again")
        except EngineFailure as error:
            manager.mark_dead(handle, str(error), cause=error.cause)
        else:
            log.info("%s is up again and gets weights with the next sync", handle)
            manager.mark_started(handle, info)
    elif now > handle.start_deadline:
        manager.mark_dead(handle, "it took too long to start")


def _take_answer(manager: Monitored, handle: EngineHandle, answer: Any) -> None:
    try:
        health = fetch(answer, handle, "answering a health probe")
    except EngineFailure as error:
        manager.mark_dead(handle, str(error), cause=error.cause)
        return
    handle.probes.answered(time.monotonic())
    handle.seconds_since_step, handle.paused = health["seconds_since_step"], health["paused"]
    if handle.seconds_since_step > manager.policy.step_timeout:
        manager.mark_dead(handle, f"its model has not made a step for {handle.seconds_since_step:.0f} s")


def _is_ready(answer: Any) -> bool:
    import ray

    return bool(ray.wait([answer], timeout=0)[0])
