"""Asking engines whether they live: now and then by a thread, and at once after something has failed."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref

from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.handle import Member, fetch
from rlhfkit.rollout.supervision.health import HealthPolicy, State

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.25


class Watched(Protocol):
    """What watching needs of a :class:`~rlhfkit.rollout.supervision.manager.Fleet`."""

    policy: HealthPolicy

    @property
    def members(self) -> list[Member]:
        """The engines."""
        ...

    def is_up(self, member: Member, info: dict[str, Any]) -> None:
        """An engine has started."""
        ...

    def bury(self, member: Member, reason: str) -> None:
        """An engine has died."""
        ...


def watch(fleet_reference: "ref[Watched]", closed: threading.Event) -> None:
    """Body of the watching thread; it ends with the fleet.

    Args:
        fleet_reference: The fleet, not kept alive.
        closed: Set when there is nothing to watch any more.
    """
    before = time.monotonic()
    while not closed.wait(_TICK_SECONDS):
        fleet, now = fleet_reference(), time.monotonic()
        if fleet is None:
            return
        if now - before > 4 * _TICK_SECONDS:  # this process itself stood still: nobody's answer could be seen
            for member in fleet.members:
                member.probes.excuse(now - before)
        before = now
        try:
            watch_once(fleet, now)
        except Exception:
            if closed.is_set():
                return
            log.exception("watching the engines failed; it goes on")
        del fleet


def watch_once(fleet: Watched, now: float) -> None:
    """Take answers that have come, send questions that are due, and bury who did not answer.

    Args:
        fleet: The engines.
        now: Seconds, monotonic.
    """
    for member in fleet.members:
        if member.state is State.DEAD:
            continue
        if member.state is State.STARTING:
            _watch_start(fleet, member, now)
        elif member.probe is not None:
            if _is_ready(member.probe):
                answer, member.probe = member.probe, None
                _take_answer(fleet, member, answer)
            elif member.probes.dead(now):
                fleet.bury(member, f"it did not answer for {now - member.probes.last_answer:.0f} s")
        elif member.probes.due(now):
            member.probe = member.actor.health.remote()
            member.probes.asked(now)


def examine(fleet: Watched, members: Sequence[Member]) -> bool:
    """Ask engines at once whether they live, after something has failed.

    Args:
        fleet: Theirs.
        members: The engines.

    Returns:
        Whether some are dead now.
    """
    import ray

    limit = fleet.policy.probe_timeout * fleet.policy.probe_failures
    up = [member for member in members if member.state not in (State.DEAD, State.STARTING)]
    asked = {member.actor.health.remote(): member for member in up}
    if asked:
        ray.wait(list(asked), num_returns=len(asked), timeout=limit)
    for answer, member in asked.items():
        if _is_ready(answer):
            _take_answer(fleet, member, answer)
        else:
            fleet.bury(member, f"it did not answer for {limit:g} s")
    return any(member.state is State.DEAD for member in members)


def _watch_start(fleet: Watched, member: Member, now: float) -> None:
    if _is_ready(member.started):
        try:
            info = fetch(member.started, member, "starting again")
        except EngineError as error:
            fleet.bury(member, str(error))
        else:
            log.info("%s is up again and gets weights with the next sync", member)
            fleet.is_up(member, info)
    elif now > member.start_by:
        fleet.bury(member, "it took too long to start")


def _take_answer(fleet: Watched, member: Member, answer: Any) -> None:
    try:
        health = fetch(answer, member, "being asked whether it lives")
    except EngineError as error:
        fleet.bury(member, str(error))
        return
    member.probes.answered(time.monotonic())
    member.silent, member.paused = health["silent"], health["paused"]
    if member.silent > fleet.policy.silence_timeout:
        fleet.bury(member, f"its model has not made a step for {member.silent:.0f} s")


def _is_ready(answer: Any) -> bool:
    import ray

    return bool(ray.wait([answer], timeout=0)[0])
