"""``Engines``: the engines of a pool as one rank uses them: which serve, which is least busy, who has failed.

All ranks have one, and ask the same :class:`~rlhfkit.rollout.supervision.table.EngineTable`.
"""

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from rlhfkit.rank_store import RankError
from rlhfkit.ray_session import cluster_address
from rlhfkit.rollout.errors import EngineError, EngineFailure
from rlhfkit.rollout.event_loop import EventLoopThread
from rlhfkit.rollout.supervision.calls import EngineCalls, EngineReceivers
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.table import UP, EngineStatus, EngineTable, PoolSettings, Snapshot

log = logging.getLogger(__name__)

ENGINE_NAMESPACE = "rlhfkit-engines"
"""Ray's namespace of all engines and their tables."""
ActorFactory = Callable[[int, str], Any]
"""Creates the Ray actor of the engine with this number, with a name in :data:`ENGINE_NAMESPACE`.

Ray must restart it as often as its process ends (``max_restarts=-1``). It is not detached, so that it ends with rank 0.
"""
TableCall = Callable[..., "Future[Any]"]
"""Calls a method of the table, given its name and arguments."""

_MAX_REQUESTS_PER_ENGINE = 2048
"""Requests in flight per engine, of all ranks. More than any engine runs at once, so that none is idle; few enough that
the last jobs go to whichever engine is done first."""
_LOAD_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""Time for the table to answer on a busy machine."""


class Engine(EngineStatus):
    """One process of an engine, as the requests of one rank see it.

    ``actor`` has the methods of :class:`~rlhfkit.rollout.vllm.actor.VLLMActor`.
    """

    def __init__(self, actor: Any, status: EngineStatus) -> None:
        self.actor = actor
        self.num_requests = 0
        """Requests in flight, of all callers of this rank."""
        self.has_worked = False
        """Whether it has answered a request of this rank."""
        self.take_over(status)

    def take_over(self, status: EngineStatus) -> None:
        vars(self).update(vars(status))

    @property
    def takes_requests(self) -> bool:
        """Whether it serves and has missed no probe."""
        return self.state is State.SERVING and self.responsive


class Engines:
    """Engines of which any may be dead. May be used from any thread; times are in seconds.

    Requests go to the engine with the fewest in flight of this rank. Among equals each rank starts at another engine,
    so that the ranks' requests are spread evenly although no rank counts those of others.
    """

    def __init__(self, call: TableCall, *, rank: int = 0, num_ranks: int = 1) -> None:
        self._call = call
        self._closed = threading.Event()
        actors, settings, limits = self._ask("constants")
        self._actors, self.settings = actors, settings
        self.num_engines: int = settings.num_engines
        self.engine_name: str = settings.engine_name
        self.policy: HealthPolicy = settings.policy
        self.max_model_len, self.vocabulary = limits
        """Tokens of prompt and completion that every engine accepts, and tokens that every engine knows."""
        self.rank = rank
        self.max_requests = max(1, _MAX_REQUESTS_PER_ENGINE // num_ranks)
        """Requests of this rank in flight on one engine, above which it gets no more."""
        self.engines_per_rank = -(-self.num_engines // num_ranks)
        """Engines that this rank has to keep busy, as the others do their part."""
        self.table_name = ""
        """By which other ranks find the table."""
        self._first = rank * self.num_engines // num_ranks  # the engine at which this rank starts
        self._lock = threading.RLock()
        self._queues: dict[int, Callable[[], str]] = {}
        self._end: Callable[[], Any] = lambda: None
        snapshot: Snapshot = self._ask("snapshot")
        self._seen = snapshot.number
        self._handles = [Engine(actor, status) for actor, status in zip(actors, snapshot.engines, strict=True)]
        self._news = self._call("changes", self._seen)

    @classmethod
    def start(cls, settings: PoolSettings, create_actor: ActorFactory, *, num_ranks: int = 1) -> "Engines":
        """Create the actors, one by one, and their table, and wait until all engines are up. Called on rank 0.

        ``num_ranks`` is the number of those that send requests; the others :meth:`join`.

        Raises:
            EngineError: If an engine fails or is late.
        """
        pool = f"rlhfkit-{uuid.uuid4().hex[:12]}"
        actors = [create_actor(number, f"{pool}-engine-{number}") for number in range(settings.num_engines)]
        if num_ranks == 1:
            call, end_table = _table_in_a_thread(EngineTable(actors, settings))
        else:
            call, end_table = _table_in_an_actor(f"{pool}-table", actors, settings)
        try:
            # Each engine has its own limit, and says which step it has not finished.
            _result(call("start"), settings.start_timeout + _ANSWER_SECONDS, "start")
            engines = cls(call, num_ranks=num_ranks)
        except BaseException:
            _end(call, actors, end_table)
            raise
        engines.table_name = f"{pool}-table"
        engines._end = weakref.finalize(engines, _end, call, actors, end_table)  # also at the end of the interpreter
        return engines

    @classmethod
    def join(cls, table_name: str, *, rank: int, num_ranks: int) -> "Engines":
        """Use the engines of rank 0 on another rank, which must be connected to Ray.

        Raises:
            EngineError: If this process is in another Ray cluster than the engines.
        """
        import ray

        try:
            table = ray.get_actor(table_name, namespace=ENGINE_NAMESPACE)
        except ValueError:
            raise EngineError(f"Ray has no actor {table_name}: it has ended, or is in another Ray cluster") from None
        return cls(_calls_of(table), rank=rank, num_ranks=num_ranks)

    def close(self) -> None:
        """Send no more requests; callers that wait get an error. On rank 0 all engines are killed."""
        self._closed.set()
        with self._lock:
            for handle in self._handles:
                handle.state, handle.reason, handle.will_restart = State.DEAD, "the pool was closed", False
        self._end()

    # ---------------------------------------------------------------- state

    def _ask(self, method: str, *args: Any, timeout: float = _ANSWER_SECONDS) -> Any:
        return self._answer(self._call(method, *args), timeout, method)

    def _change(self, method: str, *args: Any, timeout: float = _ANSWER_SECONDS) -> Any:
        """Have the table change engines, and learn of it."""
        answer = self._ask(method, *args, timeout=timeout)
        self.update(at_once=True)
        return answer

    def _answer(self, future: "Future[Any]", timeout: float, method: str) -> Any:
        try:
            return _result(future, timeout, method)
        except _TableEnded:
            self._closed.set()
            raise

    def update(self, *, at_once: bool = False) -> None:
        """Learn what has changed; called often by those who wait.

        ``at_once``: also what has changed a moment ago, as after a weight sync.
        """
        if self.closed or not (at_once or self._news.done()):
            return
        snapshot: Snapshot = self._ask("snapshot") if at_once else self._answer(self._news, 0.0, "changes")
        with self._lock:
            if snapshot.number >= self._seen and not self.closed:
                self._seen = snapshot.number
                for number, status in enumerate(snapshot.engines):
                    self._take_over(number, status)
            if snapshot.closed:
                self._closed.set()
            elif self._news.done():
                self._news = self._call("changes", self._seen)

    def _take_over(self, number: int, status: EngineStatus) -> None:
        before = engine = self._handles[number]
        known_dead = before.state is State.DEAD
        if before.restarts != status.restarts:  # requests that the old process has are lost
            before.state, before.reason = State.DEAD, before.reason or status.earlier_failure
            engine = self._handles[number] = Engine(before.actor, status)
        else:
            engine.take_over(status)
        if before.state is State.DEAD and not known_dead and self.rank == 0 and before.reason != "the pool was closed":
            again = engine is not before or engine.will_restart
            log.warning("%s is dead: %s; %s", before, before.reason, "it is restarted" if again else "not restarted")

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until an engine's state has changed."""
        concurrent.futures.wait([self._news], timeout)
        self.update()

    @property
    def handles(self) -> list[Engine]:
        """The current process of each engine, dead ones included."""
        with self._lock:
            return list(self._handles)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def all_dead(self) -> bool:
        """Whether all engines are dead and none will be restarted."""
        return all(handle.state is State.DEAD and not handle.will_restart for handle in self.handles)

    @property
    def expects_service(self) -> bool:
        """Whether some engine serves, or will when the current weight sync has ended."""
        return any(handle.state in (State.SERVING, State.SYNCING) for handle in self.handles)

    def report(self) -> str:
        """Describe every engine and every caller's queue, a line each."""
        with contextlib.suppress(EngineError, RankError):
            self.update(at_once=True)
        with self._lock:
            lines = [
                f"{handle.description}, {handle.num_requests} requests of rank {self.rank}" for handle in self._handles
            ]
            lines += [queue() for queue in self._queues.values()]
        return "\n".join(f"  {line}" for line in lines)

    @contextlib.contextmanager
    def reporting(self, describe: Callable[[], str]) -> Iterator[None]:
        """Add a caller's queue to :meth:`report` inside the context; ``describe`` is called from any thread."""
        key = id(describe)
        with self._lock:
            self._queues[key] = describe
        try:
            yield
        finally:
            with self._lock:
                del self._queues[key]

    # ---------------------------------------------------------------- requests

    def acquire(self, requests: int) -> Engine | None:
        """Add ``requests`` to the least busy serving engine and return it; ``None`` if there is none."""
        with self._lock:
            able = [one for one in self._handles if one.takes_requests and one.num_requests < self.max_requests]
            if not able:
                return None
            best = min(able, key=lambda one: (one.num_requests, (one.number - self._first) % self.num_engines))
            best.num_requests += requests
            return best

    def release(self, handle: Engine, requests: int) -> None:
        with self._lock:
            handle.num_requests -= requests

    def has_worked(self, handle: Engine) -> None:
        if not handle.has_worked:
            handle.has_worked = True
            self._call("has_worked", handle.process)

    def mark_dead(self, handle: Engine, reason: str, *, cause: str = "") -> None:
        """Have an engine killed that has failed; no effect if it is dead already.

        ``cause`` is the error that it raised; empty if its process ended or does not answer.
        """
        if self.rank:
            reason += f" (reported by rank {self.rank})"
        self._change("mark_dead", handle.process, reason, cause)

    def call(self, state: State, method: str, *args: Any, doing: str, timeout: float) -> dict[int, Any]:
        """Call a method on all engines in a state; returns results by engine number.

        Engines that fail are marked dead and the others called again. ``timeout`` is in seconds, ``doing`` for
        messages.
        """
        while True:
            self.update()
            handles = [handle for handle in self.handles if handle.state is state]
            try:
                calls = {getattr(handle.actor, method).remote(*args): handle for handle in handles}
                results = EngineCalls(calls, doing, timeout, self.update).result()
            except EngineFailure as error:
                self.mark_dead(error.engine, str(error), cause=error.cause)
            else:
                for handle in handles:
                    self.has_worked(handle)
                return dict(zip((handle.number for handle in handles), results, strict=True))

    def load(self) -> list[dict[str, float]]:
        """Return how busy each engine was since the last call; those that do not answer in seconds are left out."""
        import ray

        calls = [one.actor.take_load.remote() for one in self.handles if one.state is not State.DEAD]
        answered = ray.wait(calls, num_returns=len(calls), timeout=_LOAD_SECONDS)[0] if calls else []
        loads = []
        for call in answered:
            with contextlib.suppress(ray.exceptions.RayError):  # supervision finds out what has happened to it
                loads.append(ray.get(call))
        return [load for load in loads if load]

    # ---------------------------------------------------------------- weights and sleep: rank 0, as the table says

    def wait_until_up(self, *, wait_for_all: bool = False) -> None:
        """See :meth:`~rlhfkit.rollout.supervision.table.EngineTable.wait_until_up`."""
        self._change("wait_until_up", wait_for_all, timeout=self._start_limit)

    @property
    def _start_limit(self) -> float:
        limit: float = self.settings.start_timeout + self.policy.detection_seconds + _ANSWER_SECONDS
        return limit

    @property
    def engines_up(self) -> tuple[Engine, ...]:
        """The engines that can be sent weights now."""
        self.update(at_once=True)
        return tuple(handle for handle in self.handles if handle.state in UP)

    def begin_sync(self) -> EngineReceivers:
        """Take the engines that are up out of service for new weights; those that are starting get the next."""
        processes = self._change("begin_sync", timeout=self._start_limit)
        engines = tuple(handle for handle in self.handles if handle.process in processes)
        if len(engines) < self.num_engines:
            log.warning("weights go to %d of %d engines:\n%s", len(engines), self.num_engines, self.report())
        workers, limit = self.settings.workers_per_engine, self.settings.sync_timeout
        return EngineReceivers(engines, workers, cluster_address(), limit, self.update)

    def end_sync(self, receivers: EngineReceivers, version: int | None, *, asleep: bool = False) -> None:
        """See :meth:`~rlhfkit.rollout.supervision.table.EngineTable.end_sync`."""
        self._change("end_sync", [engine.process for engine in receivers.engines], version, asleep)

    def sleep(self, level: int) -> None:
        """See :meth:`~rlhfkit.rollout.supervision.table.EngineTable.sleep`."""
        self._change("sleep", level, timeout=self.settings.sync_timeout + _ANSWER_SECONDS)

    def wake(self) -> None:
        """See :meth:`~rlhfkit.rollout.supervision.table.EngineTable.wake`."""
        self._change("wake", timeout=self.settings.sync_timeout + _ANSWER_SECONDS)

    def probe_now(self, engines: Sequence[Engine]) -> bool:
        """Probe engines at once, after a failure; returns whether any of them is dead."""
        limit = self.policy.probe_timeout * self.policy.probe_failures + _ANSWER_SECONDS
        dead: bool = self._change("probe_now", [engine.process for engine in engines], timeout=limit)
        return dead


# ---------------------------------------------------------------- the table, here or in an actor


def _table_in_a_thread(table: EngineTable) -> tuple[TableCall, Callable[[], Any]]:
    loop = EventLoopThread("engine table")
    return lambda method, *args: loop.submit(getattr(table, method)(*args)), loop.close


def _table_in_an_actor(name: str, actors: list[Any], settings: PoolSettings) -> tuple[TableCall, Callable[[], Any]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    # Ray must import the engines' class there, or it does not know the arguments of their methods.
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    options = {"name": name, "namespace": ENGINE_NAMESPACE, "num_cpus": 0, "scheduling_strategy": here}
    kind = ray.remote(EngineTable).options(**options, max_concurrency=10_000, runtime_env=path)
    table = kind.remote(actors, settings)
    # It ends after the other ranks were told that it is closed.
    return _calls_of(table), lambda: table.__ray_terminate__.remote()


def _calls_of(table: Any) -> TableCall:
    return lambda method, *args: getattr(table, method).remote(*args).future()


class _TableEnded(EngineError):
    """Rank 0 has closed the pool, and the table has ended before this rank was told."""


def _result(future: "Future[Any]", timeout: float, method: str) -> Any:
    """Return what the table has answered within ``timeout`` seconds."""
    import ray

    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        raise EngineError(f"the table of the engines did not answer {method!r} within {timeout:g} s") from None
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        if "INTENDED_USER_EXIT" in str(error):  # Ray 2.60 has no other sign that an actor has ended itself
            raise _TableEnded("the pool was closed while requests were in flight") from None
        reason = str(error).strip().splitlines()[0]
        raise RankError(f"rank 0, which holds the table of the engines, does not answer: {reason}") from error


def _end(call: TableCall, actors: Iterable[Any], end_table: Callable[[], Any]) -> None:
    import ray

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        call("close").result(10.0)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(Exception):
        end_table()
