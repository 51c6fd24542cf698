"""``EngineDirectory``: the engines on ranks other than 0, which rank 0 manages and publishes with ``EnginePublisher``.

Ranks call the engines' actors themselves; through the rank store pass only states and reports of failures.
"""

import logging
import math
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from rlhfkit.rank_store import RankError, RankStore
from rlhfkit.ray_session import RayCluster, this_cluster
from rlhfkit.rollout.errors import CURE, EngineError
from rlhfkit.rollout.supervision.handle import ENGINE_NAMESPACE, EngineHandle, RoutedEngine
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.supervision.router import EngineRouter

log = logging.getLogger(__name__)

_PUBLISH_SECONDS = 0.25
"""Longest time until rank 0 reads a report, or publishes that an engine has missed a probe; states go out at once."""
_UPDATE_SECONDS = 0.2
_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class EngineStatus:
    """One engine, as published."""

    name: str
    actor_name: str
    state: State
    version: int | None
    reason: str
    earlier_failure: str
    will_restart: bool
    responsive: bool
    """Whether it has missed no health probe."""


@dataclass(frozen=True)
class EngineSnapshot:
    """All engines of a pool, as published by rank 0."""

    engines: tuple[EngineStatus, ...]
    closed: bool


@dataclass(frozen=True)
class EnginePoolInfo:
    """What a rank must know to use the engines of a pool: the same as long as it is open."""

    pool_id: str
    cluster: RayCluster
    """The Ray cluster in which the engines are actors."""
    num_engines: int
    engine_name: str
    policy: HealthPolicy
    max_model_len: int
    vocabulary: int

    @property
    def snapshot_key(self) -> str:
        """Key of the snapshot in the rank store."""
        return f"engines/{self.pool_id}"

    @property
    def failure_log(self) -> str:
        """Log of the rank store in which ranks report engines that failed."""
        return f"engines/{self.pool_id}/failures"


class EnginePublisher:
    """Publishes the states of rank 0's engines to the other ranks, and marks dead what they report; in a thread."""

    def __init__(self, manager: EngineManager, store: RankStore) -> None:
        self.info = EnginePoolInfo(
            manager.pool_id,
            this_cluster(),
            manager.num_engines,
            manager.engine_name,
            manager.policy,
            manager.max_model_len,
            manager.vocabulary,
        )
        self._store = store
        self._manager = weakref.ref(manager)
        self._failures = store.log(self.info.failure_log)
        self._published: EngineSnapshot | None = None
        self._lock = threading.Lock()  # snapshots are published in the order in which they were taken
        self.publish()
        manager.observer = self.publish
        self._thread = threading.Thread(target=self._run, name="engine publisher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            manager = self._manager()
            if manager is None:
                return
            try:
                self._mark_reported(manager)
                self.publish()
                if manager.closed:
                    return
                manager.wait(_PUBLISH_SECONDS)
            except RankError:  # the store has ended, and the run with it
                return
            except Exception:
                log.exception("publishing the engines' states failed; it is tried again")
                time.sleep(_PUBLISH_SECONDS)
            del manager

    def publish(self) -> None:
        """Publish the states if they have changed. Any thread."""
        manager = self._manager()
        if manager is None:
            return
        with self._lock:
            now = time.monotonic()
            engines = tuple(_status(handle, now) for handle in manager.handles)
            snapshot = EngineSnapshot(engines, manager.closed)
            if snapshot != self._published:
                self._store.publish(self.info.snapshot_key, snapshot)
                self._published = snapshot

    def _mark_reported(self, manager: EngineManager) -> None:
        for rank, (actor_name, reason, cause) in self._failures.read():
            for handle in manager.handles:
                if handle.actor_name == actor_name:
                    manager.mark_dead(handle, f"{reason} (reported by rank {rank})", cause=cause)

    def close(self) -> None:
        """Wait until the end of the engines was published; the manager is closed first."""
        self._thread.join(5.0)


def _status(handle: EngineHandle, now: float) -> EngineStatus:
    return EngineStatus(
        str(handle),
        handle.actor_name,
        handle.state,
        handle.version,
        handle.reason,
        handle.earlier_failure,
        handle.will_restart,
        responsive=not handle.probes.missed(now),
    )


class ListedEngine(RoutedEngine):
    """One engine process on a rank that does not manage it."""

    def __init__(self, status: EngineStatus, number: int) -> None:
        super().__init__(status.name, number, None, status.actor_name)
        self.responsive = True

    def takes_requests(self, now: float) -> bool:
        """Whether it serves, has missed no probe of rank 0, and has not failed here."""
        return self.state is State.SERVING and self.responsive


class EngineDirectory(EngineRouter[ListedEngine]):
    """The engines of rank 0 on another rank, which must be connected to Ray.

    States are looked up in the store, a few times a second at most, by those who wait for results. EngineError if this
    process is in another Ray cluster than the engines.
    """

    def __init__(self, info: EnginePoolInfo, store: RankStore) -> None:
        super().__init__(info.num_engines, info.engine_name, info.policy, rank=store.rank, num_ranks=store.world_size)
        self.info = info
        self.max_model_len = info.max_model_len
        self.vocabulary = info.vocabulary
        self._store = store
        self._failures = store.log(info.failure_log)
        self._updated = -math.inf
        for _, error in self._look_up():
            raise EngineError(error)

    def update(self, *, at_once: bool = False) -> None:
        """Take over the states that rank 0 has published; RankError if rank 0 is gone."""
        if at_once or time.monotonic() - self._updated >= _UPDATE_SECONDS:
            for handle, error in self._look_up():
                self.mark_dead(handle, error)

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until a state may have changed."""
        super().wait(min(timeout, _WAIT_SECONDS))
        self.update(at_once=True)

    def close(self) -> None:
        """Stop using the engines; callers that wait for one get an error."""
        with self._changed:
            self._closed.set()
            for handle in self._handles:
                handle.state, handle.reason = State.DEAD, "the pool was closed"
            self._changed.notify_all()

    def mark_dead(self, handle: ListedEngine, reason: str, *, cause: str = "") -> None:
        """Send an engine no more requests and report to rank 0 that it failed, which kills and restarts it."""
        reason = reason.replace(CURE, "").strip()
        with self._changed:
            if handle.state is State.DEAD:
                return
            # Rank 0 decides about its restart; until it has, there is hope.
            handle.state, handle.reason, handle.will_restart = State.DEAD, reason, True
            self._changed.notify_all()
        log.warning("%s failed: %s; rank 0 is told", handle, reason)
        self._failures.append((handle.actor_name, reason, cause))

    def _look_up(self) -> list[tuple[ListedEngine, str]]:
        """Take over the published snapshot; returns the engines that this process cannot reach, and why."""
        snapshot: EngineSnapshot = self._store.lookup(self.info.snapshot_key)
        failed: list[tuple[ListedEngine, str]] = []
        with self._changed:
            self._updated = time.monotonic()
            if self.closed:
                return []
            for number, status in enumerate(snapshot.engines):
                if number == len(self._handles):
                    self._handles.append(ListedEngine(status, number))
                elif self._handles[number].actor_name != status.actor_name:
                    self._replace(number, status)
                error = _take_over(self._handles[number], status)
                if error:
                    failed.append((self._handles[number], error))
            if snapshot.closed:
                self._closed.set()
            self._changed.notify_all()
        return failed

    def _replace(self, number: int, status: EngineStatus) -> None:
        """List an engine's new process; requests that the old one has are lost."""
        before = self._handles[number]
        if before.state is not State.DEAD:
            before.state, before.reason = State.DEAD, "it was restarted"
        self._handles[number] = ListedEngine(status, number)


def _take_over(engine: ListedEngine, status: EngineStatus) -> str:
    """Take over an engine's published status, and connect to it once it is up; returns why that failed, or nothing."""
    if engine.state is State.DEAD and status.state is not State.DEAD:
        return ""  # it has failed here, which rank 0 has not read yet
    engine.name, engine.version, engine.responsive = status.name, status.version, status.responsive
    engine.state, engine.will_restart = status.state, status.will_restart
    engine.reason, engine.earlier_failure = engine.reason or status.reason, status.earlier_failure
    if engine.actor is None and engine.state not in (State.STARTING, State.DEAD):
        try:
            engine.actor = find_engine(engine.actor_name)
        except EngineError as error:
            return str(error)
    return ""


def find_engine(actor_name: str) -> Any:
    """Return Ray's handle to an engine's actor; EngineError if this process's cluster has no such actor."""
    import ray

    try:
        return ray.get_actor(actor_name, namespace=ENGINE_NAMESPACE)
    except ValueError:
        raise EngineError(f"Ray has no actor {actor_name}: it has ended, or is in another Ray cluster") from None
