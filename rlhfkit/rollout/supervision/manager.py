"""``EngineManager``: starts the engines of a pool, probes them, hands them out, and restarts those that die.

All methods may be called from any thread. A caller handles the failure of its own remote call to an engine that died.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rlhfkit.ray_session import cluster_address
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure
from rlhfkit.rollout.supervision.handle import EngineHandle, EngineHandles, RemoteCall, kill_processes
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.health_monitor import monitor_health
from rlhfkit.rollout.supervision.remote_engine import ActorFactory

log = logging.getLogger(__name__)

_UP = (State.STALE, State.SERVING, State.ASLEEP)


class EngineManager:
    """N remote engines, some of which may be dead. All times are in seconds.

    ``create_actor`` is called again for each restart; ``workers_per_engine`` counts processes that hold weights;
    ``sync_timeout`` is for each step of a weight transfer, ``start_timeout`` for a start or restart; ``has_weights``:
    engines serve the model's own weights, as version 0, once started.
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
    ) -> None:
        self.num_engines = num_engines
        self.create_actor = create_actor
        self.engine_name = engine_name
        self.workers_per_engine = workers_per_engine
        self.sync_timeout = sync_timeout
        self.start_timeout = start_timeout
        self.policy = policy
        self.max_model_len = 0
        """Tokens of prompt and completion that every engine accepts; known after :meth:`start`."""
        self.vocabulary = 0
        """Number of tokens that every engine knows; known after :meth:`start`."""
        self._has_weights = has_weights
        self._changed = threading.Condition(threading.RLock())
        self._handles: list[EngineHandle] = []
        self._queues: dict[int, Callable[[], str]] = {}
        self._closed = threading.Event()
        self._sleep_level: int | None = None  # while engines sleep
        weakref.finalize(self, _kill_all, self._handles, self._closed)  # also at the end of the interpreter

    # ---------------------------------------------------------------- start and end

    def start(self) -> None:
        """Create the actors, wait until all are up, and start to probe them; EngineError if one fails or is late."""
        self._handles.extend(self._launch(number, restarts=0) for number in range(self.num_engines))
        starts = {handle.start_ref: handle for handle in self._handles}
        try:
            call = RemoteCall(starts, "starting (importing packages and building the model)", self.start_timeout)
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
        actor = self.create_actor(number)
        name = f"{self.engine_name} {number} of {self.num_engines}"
        return EngineHandle(name, number, actor, actor.start.remote(), restarts, self.policy, self.start_timeout)

    def mark_started(self, handle: EngineHandle, info: dict[str, Any]) -> None:
        """Record that an engine has started; ``info`` is what its ``start`` returned."""
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.info = info
            handle.probes.answered(time.monotonic())
            handle.change_state(State.STALE)
            if self._has_weights:
                handle.version = 0
                handle.change_state(State.SERVING)
            if self._sleep_level is not None:  # restarted while the others sleep
                handle.change_state(State.ASLEEP)
                handle.asleep = True
                handle.version = handle.version if self._sleep_level == 1 else None
                handle.actor.sleep.remote(self._sleep_level)
            self._changed.notify_all()

    # ---------------------------------------------------------------- state

    @property
    def handles(self) -> list[EngineHandle]:
        """The current process of each engine, dead ones included."""
        with self._changed:
            return list(self._handles)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.is_set()

    @property
    def all_dead(self) -> bool:
        """Whether all engines are dead and none will be restarted."""
        return all(handle.state is State.DEAD for handle in self.handles)

    @property
    def expects_service(self) -> bool:
        """Whether some engine serves, or will when the current weight sync has ended."""
        return any(handle.state in (State.SERVING, State.SYNCING) for handle in self.handles)

    def report(self) -> str:
        """Describe every engine and every caller's queue, a line each."""
        now = time.monotonic()
        with self._changed:
            lines = [handle.describe(now) for handle in self._handles] + [one() for one in self._queues.values()]
        return "\n".join(f"  {line}" for line in lines)

    @contextlib.contextmanager
    def reporting(self, describe: Callable[[], str]) -> Iterator[None]:
        """Add a caller's queue to :meth:`report` inside the context; ``describe`` is called from any thread."""
        key = id(describe)
        with self._changed:
            self._queues[key] = describe
        try:
            yield
        finally:
            with self._changed:
                del self._queues[key]

    def _group(self, handles: Iterable[EngineHandle]) -> EngineHandles:
        return EngineHandles(tuple(handles), self.workers_per_engine, cluster_address(), self.sync_timeout)

    # ---------------------------------------------------------------- requests

    def acquire(self, requests: int, limit: int) -> EngineHandle | None:
        """Add ``requests`` to the least busy serving engine and return it; ``None`` if all have ``limit`` or more."""
        now = time.monotonic()
        with self._changed:
            able = [handle for handle in self._handles if handle.takes_requests(now) and handle.num_requests < limit]
            if not able:
                return None
            best = min(able, key=lambda handle: handle.num_requests)
            best.num_requests += requests
            return best

    def release(self, handle: EngineHandle, requests: int) -> None:
        """Count requests as no longer in flight: answered, lost or cancelled."""
        with self._changed:
            handle.num_requests -= requests
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until an engine's state has changed."""
        with self._changed:
            self._changed.wait(timeout)

    def call(self, state: State, method: str, *args: Any, doing: str, timeout: float) -> dict[int, Any]:
        """Call a ``RemoteEngine`` method on all engines in a state; returns results by engine number.

        Engines that fail are marked dead and the others called again. ``timeout`` is in seconds, ``doing`` for
        messages.
        """
        while True:
            handles = self._group(handle for handle in self.handles if handle.state is state)
            try:
                results = handles.submit(method, *args, doing=doing, timeout=timeout).result()
            except EngineFailure as error:
                self.mark_dead(error.engine, str(error))
            else:
                return dict(zip((handle.number for handle in handles.handles), results, strict=True))

    # ---------------------------------------------------------------- weights and sleep

    def begin_sync(self, *, wait_for_all: bool = False) -> EngineHandles:
        """Take the engines that are up out of service for new weights; EngineError if none is within ``start_timeout``.

        Those that are starting get the next weights, or are waited for if ``wait_for_all`` is set.
        """
        deadline = time.monotonic() + self.start_timeout + self.policy.detection_seconds
        with self._changed:
            while True:
                up = [handle for handle in self._handles if handle.state in _UP]
                starting = any(handle.state is State.STARTING for handle in self._handles)
                if up and not (wait_for_all and starting):
                    break
                if self.closed or not starting or time.monotonic() >= deadline:
                    raise EngineError(f"no engine is there to be sent weights:\n{self.report()}\n{CURE}")
                self._changed.wait(1.0)
            self._has_weights, self._sleep_level = False, None
            for handle in up:
                handle.version = None
                handle.change_state(State.SYNCING)
            if len(up) < len(self._handles):
                log.warning("weights go to %d of %d engines:\n%s", len(up), len(self._handles), self.report())
        return self._group(up)

    def end_sync(self, handles: EngineHandles, version: int | None) -> None:
        """Return engines to service with ``version``; ``None``: the transfer failed and their weights are unusable."""
        with self._changed:
            for handle in handles.handles:
                if handle.state is State.SYNCING:
                    handle.version, handle.has_partial_weights = version, version is None
                    handle.asleep = handle.asleep and handle.has_partial_weights
                    handle.change_state(State.STALE if version is None else State.SERVING)
            self._changed.notify_all()

    def sleep(self, level: int) -> None:
        """Have engines that are up free GPU memory: vLLM's level 1 keeps weights in main memory, 2 drops them."""
        with self._changed:
            self._sleep_level = level
            for handle in self._handles:
                if handle.state in (State.SERVING, State.STALE):
                    handle.change_state(State.ASLEEP)
                    handle.asleep = True
                    handle.version = handle.version if level == 1 else None
            self._changed.notify_all()
        self.call(State.ASLEEP, "sleep", level, doing="falling asleep", timeout=self.sync_timeout)

    def wake(self) -> None:
        """Have every sleeping engine allocate its memory; those that kept their weights serve."""
        with self._changed:
            self._sleep_level = None
        self.call(State.ASLEEP, "wake", doing="waking up", timeout=self.sync_timeout)
        with self._changed:
            for handle in self._handles:
                if handle.state is State.ASLEEP:
                    handle.asleep = False
                    handle.change_state(State.STALE if handle.version is None else State.SERVING)
            self._changed.notify_all()

    # ---------------------------------------------------------------- deaths

    def mark_dead(self, handle: EngineHandle, reason: str) -> None:
        """Mark an engine dead, kill it, and restart it within ``max_restarts``; no effect if it is dead already."""
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.reason = reason.replace(CURE, "").strip()
            handle.change_state(State.DEAD)
            restart = handle.restarts < self.policy.max_restarts and not self.closed
            self._changed.notify_all()
        log.warning("%s is dead: %s; %s", handle, handle.reason, "restarting it" if restart else "not restarted")
        _kill(handle)
        if restart:
            successor = self._launch(handle.number, handle.restarts + 1)
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
