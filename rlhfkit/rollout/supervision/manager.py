"""``EngineManager``: the engines of a pool: started, watched, given work, and started again when they die.

All methods may be called from any thread. A thread of the manager's own asks every engine whether it lives; what an
engine was doing when it died is the business of whoever asked it to.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure
from rlhfkit.rollout.remote.placement import ActorPlacement
from rlhfkit.rollout.supervision.handle import EngineHandle, EngineHandles, RemoteCall, kill_processes
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.health_monitor import watch
from rlhfkit.rollout.vllm.actor import VLLMActor
from rlhfkit.rollout.vllm.ray_session import cluster_address

log = logging.getLogger(__name__)

_UP = (State.STALE, State.SERVING, State.ASLEEP)


class EngineManager:
    """N vLLM engines, of which some may be dead.

    Args:
        places: One per engine.
        arguments: Of ``vllm.EngineArgs``.
        in_process: Whether engines are stepped in the actor's own process.
        environment: Environment variables of all engines; must be set before they import torch.
        workers_each: Processes that hold weights, per engine.
        sync_timeout: Seconds for each step of a weight transfer.
        start_timeout: Seconds for an engine to start, the first time or again.
        policy: How engines are watched.
        serves_at_once: Whether engines come up with the weights they have to serve: the model's own.
    """

    def __init__(
        self,
        places: Sequence[ActorPlacement],
        arguments: dict[str, Any],
        *,
        in_process: bool,
        environment: dict[str, str],
        workers_each: int,
        sync_timeout: float,
        start_timeout: float,
        policy: HealthPolicy,
        serves_at_once: bool = False,
    ) -> None:
        self.policy = policy
        self.max_model_len = 0
        self.vocabulary = 0
        self._places = list(places)
        self._arguments = arguments
        self._in_process = in_process
        self._environment = environment
        self._workers_each = workers_each
        self._sync_timeout = sync_timeout
        self._start_timeout = start_timeout
        self._serves_at_once = serves_at_once
        self._changed = threading.Condition(threading.RLock())
        self._handles: list[EngineHandle] = []
        self._queues: dict[int, Callable[[], str]] = {}
        self._closed = threading.Event()
        self._sleep_level: int | None = None  # while engines sleep
        weakref.finalize(self, _end, self._handles, self._closed)  # also at the end of the interpreter

    # ---------------------------------------------------------------- start and end

    def start(self) -> None:
        """Create the actors and wait until all are up; from then on they are watched.

        Raises:
            EngineError: If an engine cannot start, or the time is up.
        """
        self._handles.extend(self._launch(number, restarts=0) for number in range(len(self._places)))
        starts = {handle.started: handle for handle in self._handles}
        try:
            call = RemoteCall(starts, "starting (importing vLLM and building the model)", self._start_timeout)
            for handle, info in zip(self._handles, call.result(), strict=True):
                self.is_up(handle, info)
        except BaseException:
            self.close()
            raise
        self.max_model_len = min(handle.info["max_model_len"] for handle in self._handles)
        self.vocabulary = min(handle.info["vocabulary"] for handle in self._handles)
        arguments = (weakref.ref(self), self._closed)
        threading.Thread(target=watch, args=arguments, name="engine health", daemon=True).start()

    def close(self) -> None:
        """End all engines, also when Ray is gone already. Whoever waits for one is told so."""
        self._closed.set()
        with self._changed:
            handles = list(self._handles)
            for handle in handles:
                if handle.state is not State.DEAD:
                    handle.reason = "the pool was closed"
                    handle.become(State.DEAD)
            self._changed.notify_all()
        for handle in handles:
            _kill(handle)

    def _launch(self, number: int, restarts: int) -> EngineHandle:
        """A new process for an engine."""
        import ray

        place = self._places[number]
        remote = ray.remote(VLLMActor).options(
            **place.options,
            # Async methods wait in vLLM's own queue, not in Ray's: all may be inside at once.
            max_concurrency=10_000,
            runtime_env={"env_vars": self._environment},
        )
        actor = remote.remote(self._arguments, self._in_process, place.environment, place.not_on)
        size = len(self._places)
        return EngineHandle(number, size, actor, actor.start.remote(), restarts, self.policy, self._start_timeout)

    def is_up(self, handle: EngineHandle, info: dict[str, Any]) -> None:
        """An engine has started.

        Args:
            handle: The engine.
            info: What its ``start`` returned.
        """
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.info = info
            handle.probes.answered(time.monotonic())
            handle.become(State.STALE)
            if self._serves_at_once:
                handle.version = 0
                handle.become(State.SERVING)
            if self._sleep_level is not None:  # started again in a time that is the training's: nobody waits for it
                handle.become(State.ASLEEP)
                handle.asleep = True
                handle.version = handle.version if self._sleep_level == 1 else None
                handle.actor.sleep.remote(self._sleep_level)
            self._changed.notify_all()

    # ---------------------------------------------------------------- who is there

    @property
    def handles(self) -> list[EngineHandle]:
        """The engines as they are now, the dead ones among them."""
        with self._changed:
            return list(self._handles)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed.is_set()

    @property
    def hopeless(self) -> bool:
        """Whether all engines are dead for good."""
        return all(handle.state is State.DEAD for handle in self.handles)

    @property
    def expects_service(self) -> bool:
        """Whether some engine serves, or will when the weight sync under way has ended."""
        return any(handle.state in (State.SERVING, State.SYNCING) for handle in self.handles)

    def _several(self, handles: Iterable[EngineHandle]) -> EngineHandles:
        return EngineHandles(tuple(handles), self._workers_each, cluster_address(), self._sync_timeout)

    # ---------------------------------------------------------------- requests

    def acquire(self, requests: int, most: int) -> EngineHandle | None:
        """The serving engine with the fewest requests of all callers, now charged with these.

        Args:
            requests: How many it will be given.
            most: No engine that has as many already is given more.

        Returns:
            ``None`` if there is none.
        """
        now = time.monotonic()
        with self._changed:
            able = [handle for handle in self._handles if handle.takes_requests(now) and handle.load < most]
            if not able:
                return None
            best = min(able, key=lambda handle: handle.load)
            best.load += requests
            return best

    def release(self, handle: EngineHandle, requests: int) -> None:
        """What :meth:`acquire` gave has been answered, or is not waited for any more.

        Args:
            handle: The engine.
            requests: How many.
        """
        with self._changed:
            handle.load -= requests
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Until something about an engine has changed, or for so many seconds."""
        with self._changed:
            self._changed.wait(timeout)

    @contextlib.contextmanager
    def queue(self, describe: Callable[[], str]) -> Any:
        """Inside, a caller's queue is part of :meth:`report`.

        Args:
            describe: Its state in words; called from any thread.
        """
        key = id(describe)
        with self._changed:
            self._queues[key] = describe
        try:
            yield
        finally:
            with self._changed:
                del self._queues[key]

    def report(self) -> str:
        """The state of every engine and of every caller's queue, a line each."""
        now = time.monotonic()
        with self._changed:
            lines = [handle.describe(now) for handle in self._handles] + [one() for one in self._queues.values()]
        return "\n".join(f"  {line}" for line in lines)

    # ---------------------------------------------------------------- weight syncs

    def begin_sync(self, *, of_all: bool = False) -> EngineHandles:
        """Take the engines that are up out of service, for new weights. Those still starting get the next ones.

        Args:
            of_all: Wait for those that are starting.

        Raises:
            EngineError: If there is none, and none came up within the start's time limit.
        """
        deadline = time.monotonic() + self._start_timeout + self.policy.detection_seconds
        with self._changed:
            while True:
                up = [handle for handle in self._handles if handle.state in _UP]
                starting = any(handle.state is State.STARTING for handle in self._handles)
                if up and not (of_all and starting):
                    break
                if self.closed or not starting or time.monotonic() >= deadline:
                    raise EngineError(f"no engine is there to be sent weights:\n{self.report()}\n{CURE}")
                self._changed.wait(1.0)
            self._serves_at_once, self._sleep_level = False, None
            for handle in up:
                handle.version = None
                handle.become(State.SYNCING)
            if len(up) < len(self._handles):
                log.warning("weights go to %d of %d engines:\n%s", len(up), len(self._handles), self.report())
        return self._several(up)

    def end_sync(self, handles: EngineHandles, version: int | None) -> None:
        """Put them into service, or not.

        Args:
            handles: What :meth:`begin_sync` returned.
            version: Of the weights they have now; ``None``: the transfer failed, and they hold garbage.
        """
        with self._changed:
            for handle in handles.handles:
                if handle.state is State.SYNCING:
                    handle.version, handle.dirty = version, version is None
                    handle.asleep = handle.asleep and handle.dirty
                    handle.become(State.STALE if version is None else State.SERVING)
            self._changed.notify_all()

    def fall_asleep(self, level: int, keep: bool) -> None:
        """Have every engine that is up give its memory back.

        Args:
            level: Of vLLM.
            keep: Whether the weights come back when they wake.
        """
        with self._changed:
            self._sleep_level = level
            for handle in self._handles:
                if handle.state in (State.SERVING, State.STALE):
                    handle.become(State.ASLEEP)
                    handle.asleep = True
                    handle.version = handle.version if keep else None
            self._changed.notify_all()
        self.ask(State.ASLEEP, "sleep", level, doing="falling asleep", timeout=self._sync_timeout)

    def wake_up(self) -> None:
        """Have every engine that is asleep take its memory again; those that kept their weights serve."""
        with self._changed:
            self._sleep_level = None
        self.ask(State.ASLEEP, "wake", doing="waking up", timeout=self._sync_timeout)
        with self._changed:
            for handle in self._handles:
                if handle.state is State.ASLEEP:
                    handle.asleep = False
                    handle.become(State.STALE if handle.version is None else State.SERVING)
            self._changed.notify_all()

    def ask(self, state: State, method: str, *args: Any, doing: str, timeout: float) -> dict[int, Any]:
        """Call a method on all engines that are in a certain state. If some die of it, the others are asked again.

        Args:
            state: Of the engines.
            method: Of :class:`~rlhfkit.rollout.vllm.actor.VLLMActor`.
            *args: Its arguments.
            doing: For messages.
            timeout: Seconds.

        Returns:
            Answers by the engines' numbers.
        """
        while True:
            handles = self._several(handle for handle in self.handles if handle.state is state)
            try:
                answers = handles.submit(method, *args, doing=doing, timeout=timeout).result()
            except EngineFailure as error:
                self.mark_dead(error.engine, str(error))
            else:
                return dict(zip((handle.number for handle in handles.handles), answers, strict=True))

    # ---------------------------------------------------------------- deaths

    def mark_dead(self, handle: EngineHandle, reason: str) -> None:
        """Take an engine for dead: it is killed, and started again unless that was done too often.

        Args:
            handle: The engine; nothing happens if it is dead already.
            reason: For logs and reports.
        """
        with self._changed:
            if handle.state is State.DEAD:
                return
            handle.reason = reason.replace(CURE, "").strip()
            handle.become(State.DEAD)
            again = handle.restarts < self.policy.max_restarts and not self.closed
            self._changed.notify_all()
        log.warning("%s is dead: %s; %s", handle, handle.reason, "starting it again" if again else "it stays so")
        _kill(handle)
        if again:
            successor = self._launch(handle.number, handle.restarts + 1)
            with self._changed:
                late = self.closed
                if not late:
                    self._handles[handle.number] = successor
                self._changed.notify_all()
            if late:
                _kill(successor)


def _end(handles: list[EngineHandle], closed: threading.Event) -> None:
    """End what a manager has left behind."""
    if not closed.is_set():
        closed.set()
        for handle in handles:
            _kill(handle)


def _kill(handle: EngineHandle) -> None:
    """End an engine's processes, without waiting, whatever state they are in."""
    import ray

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        ray.kill(handle.actor, no_restart=True)
    processes = handle.info.get("processes")
    if not processes:
        return
    # A stopped process does not obey Ray, which asks it to end itself.
    with contextlib.suppress(Exception):
        if handle.info["node"] == ray.get_runtime_context().get_node_id():
            kill_processes(processes)
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(handle.info["node"], soft=False)
        ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=there).remote(processes)
