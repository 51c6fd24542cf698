"""``EngineManager``: starts the engines of a pool, probes them, hands them out, and restarts those that die.

All methods may be called from any thread. A caller handles the failure of its own remote call to an engine that died.
"""

import contextlib
import logging
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhfkit.ray_session import cluster_address
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure
from rlhfkit.rollout.supervision.handle import (
    ActorFactory,
    EngineCalls,
    EngineHandle,
    EngineHandles,
    fetch,
    kill_processes,
)
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.router import EngineRouter

log = logging.getLogger(__name__)

_UP = (State.STALE, State.SERVING, State.ASLEEP)


class EngineManager(EngineRouter[EngineHandle]):
    """N remote engines of which any may be dead, on rank 0. All times are in seconds.

    ``create_actor`` is called again for each restart; ``workers_per_engine`` counts processes that hold weights;
    ``sync_timeout`` is for each step of a weight transfer, ``start_timeout`` for a start or restart; ``has_weights``:
    engines serve the model's own weights, as version 0, once started; ``num_ranks`` send requests to the engines, each
    through a router of its own.
    """

    def __init__(
        self,
        num_engines: int,
        create_actor: ActorFactory,
        *,
        engine_name: str = "vLLM engine",
        workers_per_engine: int = 1,
        sync_timeout: float,
        start_timeout: float,
        policy: HealthPolicy,
        has_weights: bool = False,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(num_engines, engine_name, policy, rank=0, num_ranks=num_ranks)
        self.create_actor = create_actor
        self.workers_per_engine = workers_per_engine
        self.sync_timeout = sync_timeout
        self.start_timeout = start_timeout
        self.pool_id = uuid.uuid4().hex[:12]
        """Part of the actors' names, so that they differ from those of other pools in the same Ray cluster."""
        self._has_weights = has_weights
        self._sleep_level: int | None = None  # while engines sleep
        self.observer: Callable[[], None] | None = None
        """Called when a weight sync, :meth:`sleep` or :meth:`wake` has changed the engines' states, before it returns;
        other changes are learned from :meth:`wait`."""
        weakref.finalize(self, _kill_all, self._handles, self._closed)  # also at the end of the interpreter

    # ---------------------------------------------------------------- start and end

    def start(self) -> None:
        """Create the actors, wait until all are up, and start to probe them; EngineError if one fails or is late."""
        self._handles.extend(self._launch(number, restarts=0) for number in range(self.num_engines))
        starts = {handle.start_ref: handle for handle in self._handles}
        try:
            call = EngineCalls(starts, "starting (importing packages and building the model)", self.start_timeout)
            for handle, info in zip(self._handles, call.result(), strict=True):
                self.mark_started(handle, info)
        except BaseException:
            self.close()
            raise
        self.max_model_len = min(handle.info["max_model_len"] for handle in self._handles)
        self.vocabulary = min(handle.info["vocabulary"] for handle in self._handles)
        arguments = (weakref.ref(self), self._closed)
        threading.Thread(target=monitor_health, args=arguments, name="engine health", daemon=True).start()

    def close(self) -> None:
        """Kill all engines, even if Ray has shut down; callers that wait for one get an error."""
        self._closed.set()
        with self._changed:
            handles = list(self._handles)
            for handle in handles:
                if handle.state is not State.DEAD:
                    handle.reason = "the pool was closed"
                    handle.change_state(State.DEAD)
            self._changed.notify_all()
        for handle in handles:
            _kill(handle)

    def _launch(self, number: int, restarts: int) -> EngineHandle:
        actor_name = f"rlhfkit-{self.pool_id}-engine-{number}-restart-{restarts}"
        actor = self.create_actor(number, actor_name)
        return EngineHandle(
            f"{self.engine_name} {number} of {self.num_engines}",
            number,
            actor,
            actor.start.remote(),
            restarts,
            self.policy,
            self.start_timeout,
            actor_name,
        )

    def mark_started(self, handle: EngineHandle, info: dict[str, Any]) -> None:
        """Record that an engine has started; ``info`` is what its ``start`` returned.

        One that comes up while the others sleep falls asleep first: it is starting until it has, and has woken again if
        the others have meanwhile.
        """
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.info = handle.info or info
            handle.probes.answered(time.monotonic())
            level, actor = self._sleep_level, handle.actor
            if handle.sleep_level != level:
                handle.sleep_level = level
                handle.start_ref = actor.wake.remote() if level is None else actor.sleep.remote(level)
                handle.start_deadline = time.monotonic() + self.sync_timeout
                return
            handle.change_state(State.STALE)
            if self._has_weights:
                handle.version = 0
                handle.change_state(State.SERVING)
            if level is not None:
                handle.change_state(State.ASLEEP)
                handle.asleep = True
                handle.version = handle.version if level == 1 else None
            self._changed.notify_all()

    @property
    def handles(self) -> list[EngineHandle]:
        """The current process of each engine, dead ones included."""
        return list(super().handles)

    # ---------------------------------------------------------------- weights and sleep

    def _group(self, handles: Iterable[EngineHandle]) -> EngineHandles:
        return EngineHandles(tuple(handles), self.workers_per_engine, cluster_address(), self.sync_timeout)

    def wait_until_up(self, *, wait_for_all: bool = False) -> None:
        """Wait until an engine can be sent weights; with ``wait_for_all``, until none is starting.

        Raises EngineError if none is up within ``start_timeout``.
        """
        self._restart_postponed()
        deadline = time.monotonic() + self.start_timeout + self.policy.detection_seconds
        with self._changed:
            while True:
                up = any(handle.state in _UP for handle in self._handles)
                starting = any(handle.state is State.STARTING or handle.will_restart for handle in self._handles)
                if up and not (wait_for_all and starting):
                    return
                if self.closed or not starting or time.monotonic() >= deadline:
                    raise EngineError(f"no engine is there to be sent weights:\n{self.report()}\n{CURE}")
                self._changed.wait(1.0)

    @property
    def engines_up(self) -> tuple[EngineHandle, ...]:
        """The engines that can be sent weights now."""
        return tuple(handle for handle in self._handles if handle.state in _UP)

    def begin_sync(self) -> EngineHandles:
        """Take the engines that are up out of service for new weights, after :meth:`wait_until_up`.

        Those that are starting get the next weights.
        """
        with self._changed:
            self.wait_until_up()
            self._has_weights, self._sleep_level = False, None
            up = self.engines_up
            for handle in up:
                handle.version = None
                handle.change_state(State.SYNCING)
            self._changed.notify_all()
            if len(up) < len(self._handles):
                log.warning("weights go to %d of %d engines:\n%s", len(up), len(self._handles), self.report())
        return self._group(up)

    def end_sync(self, handles: EngineHandles, version: int | None, *, asleep: bool = False) -> None:
        """Return engines to service with ``version``; ``None``: the transfer failed and their weights are unusable.

        ``asleep``: they have their weights, and serve after :meth:`wake`.
        """
        complete = State.ASLEEP if asleep else State.SERVING
        with self._changed:
            for handle in handles.handles:
                if handle.state is State.SYNCING:
                    handle.version, handle.has_partial_weights = version, version is None
                    handle.asleep = handle.asleep if version is None else asleep
                    handle.change_state(State.STALE if version is None else complete)
        self._notify()

    def sleep(self, level: int) -> None:
        """Have engines that are up free GPU memory: vLLM's level 1 keeps weights in main memory, 2 drops them."""
        with self._changed:
            self._sleep_level = level
            for handle in self._handles:
                if handle.state in (State.SERVING, State.STALE):
                    handle.change_state(State.ASLEEP)
                    handle.asleep = True
                    handle.version = handle.version if level == 1 else None
        self._notify()
        self.call(State.ASLEEP, "sleep", level, doing="falling asleep", timeout=self.sync_timeout)

    def wake(self) -> None:
        """Have every sleeping engine allocate its memory; those that kept their weights serve.

        Engines that died while the others slept are started again.
        """
        with self._changed:
            self._sleep_level = None
        self._restart_postponed()
        self.call(State.ASLEEP, "wake", doing="waking up", timeout=self.sync_timeout)
        with self._changed:
            for handle in self._handles:
                if handle.state is State.ASLEEP:
                    handle.asleep = False
                    handle.change_state(State.STALE if handle.version is None else State.SERVING)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self.observer is not None:
            self.observer()

    # ---------------------------------------------------------------- deaths

    def mark_dead(self, handle: EngineHandle, reason: str, *, cause: str = "") -> None:
        """Mark an engine dead, kill it, and restart it within ``max_restarts``; no effect if it is dead already.

        While the engines sleep, and training has the memory, it is restarted when they are needed again. It is not
        restarted if it raised the same error as the process before it, and has answered no request since.
        """
        cause = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.reason = reason.replace(CURE, "").strip()
            repeated = bool(cause) and cause == handle.earlier_cause and not handle.has_worked
            if repeated:
                handle.reason += " (the process before it failed in the same way)"
            # Before it is dead: other threads would find that all engines are dead and none is restarted.
            restart = handle.restarts < self.policy.max_restarts and not self.closed and not repeated
            handle.will_restart = restart
            handle.postponed = postponed = restart and self._sleep_level is not None
            handle.change_state(State.DEAD)
            self._changed.notify_all()
            handle.cause = cause
        when = "restarting it when the engines wake" if postponed else "restarting it" if restart else "not restarted"
        log.warning("%s is dead: %s; %s", handle, handle.reason, when)
        _kill(handle)
        if restart and not postponed:
            self._restart(handle)

    def _restart_postponed(self) -> None:
        """Start engines again that died while the others slept."""
        with self._changed:
            postponed = [handle for handle in self._handles if handle.state is State.DEAD and handle.postponed]
            for handle in postponed:
                handle.postponed = False
        for handle in postponed:
            self._restart(handle)

    def _restart(self, handle: EngineHandle) -> None:
        """Give a dead engine's number to a new process."""
        try:
            successor = self._launch(handle.number, handle.restarts + 1)
            successor.earlier_failure, successor.earlier_cause = handle.reason, handle.cause
        except BaseException:
            handle.will_restart = False
            raise
        with self._changed:
            too_late = self.closed
            if not too_late:
                self._handles[handle.number] = successor
            self._changed.notify_all()
        if too_late:
            _kill(successor)


def _kill_all(handles: list[EngineHandle], closed: threading.Event) -> None:
    """Kill the engines of a manager that was not closed."""
    if not closed.is_set():
        closed.set()
        for handle in handles:
            _kill(handle)


def _kill(handle: EngineHandle) -> None:
    """Kill an engine's processes in any state, without waiting."""
    import ray

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        ray.kill(handle.actor, no_restart=True)
    processes = handle.info.get("processes")
    if not processes:
        return
    # Ray asks a process to exit, which a suspended one does not do.
    with contextlib.suppress(Exception):
        if handle.info["node"] == ray.get_runtime_context().get_node_id():
            kill_processes(processes)
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(handle.info["node"], soft=False)
        ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=there).remote(processes)


# ---------------------------------------------------------------- probes

_TICK_SECONDS = 0.25


def monitor_health(manager_ref: "weakref.ref[EngineManager]", closed: threading.Event) -> None:
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


def check_engines(manager: EngineManager, now: float) -> None:
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


def probe_now(manager: EngineManager, handles: Sequence[EngineHandle]) -> bool:
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


def _check_start(manager: EngineManager, handle: EngineHandle, now: float) -> None:
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


def _take_answer(manager: EngineManager, handle: EngineHandle, answer: Any) -> None:
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
