"""``EngineRouter``: the engines of a pool as the requests of one rank see them: which serve, and which is least busy.

:class:`~rlhfkit.rollout.supervision.manager.EngineManager` is that of rank 0, which owns the engines;
:class:`~rlhfkit.rollout.supervision.directory.EngineDirectory` that of the other ranks. May be used from any thread.
"""

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from rlhfkit.rollout.errors import EngineFailure
from rlhfkit.rollout.supervision.handle import EngineCalls, RoutedEngine
from rlhfkit.rollout.supervision.health import HealthPolicy, State

Engine = TypeVar("Engine", bound=RoutedEngine)

_MAX_REQUESTS_PER_ENGINE = 2048
"""Requests in flight per engine, of all ranks. More than any engine runs at once, so that none is idle; few enough that
the last jobs go to whichever engine is done first."""


class EngineRouter(Generic[Engine]):
    """Engines of which any may be dead.

    Requests go to the engine with the fewest in flight of this rank. Among equals each rank starts at another engine,
    so that the ranks' requests are spread evenly although no rank counts those of others.
    """

    def __init__(self, num_engines: int, engine_name: str, policy: HealthPolicy, *, rank: int, num_ranks: int) -> None:
        self.num_engines = num_engines
        self.engine_name = engine_name
        self.policy = policy
        self.max_model_len = 0
        """Tokens of prompt and completion that every engine accepts; known once the engines have started."""
        self.vocabulary = 0
        """Number of tokens that every engine knows; known once the engines have started."""
        self.rank = rank
        self.max_requests = max(1, _MAX_REQUESTS_PER_ENGINE // num_ranks)
        """Requests of this rank in flight on one engine, above which it gets no more."""
        self.engines_per_rank = -(-num_engines // num_ranks)
        """Engines that this rank has to keep busy, as the others do their part."""
        self._first = rank * num_engines // num_ranks  # the engine at which this rank starts
        self._changed = threading.Condition(threading.RLock())
        self._handles: list[Engine] = []
        self._queues: dict[int, Callable[[], str]] = {}
        self._closed = threading.Event()

    @abstractmethod
    def mark_dead(self, handle: Engine, reason: str, *, cause: str = "") -> None:
        """Stop using an engine that has failed; no effect if it is dead already.

        ``cause`` is the error that it raised; empty if its process ended or does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Send no more requests; callers that wait for one get an error."""

    def update(self, *, at_once: bool = False) -> None:
        """Learn what has changed; called often by those who wait.

        ``at_once``: also what has changed a moment ago, as after a weight sync.
        """

    # ---------------------------------------------------------------- state

    @property
    def handles(self) -> Sequence[Engine]:
        """The current process of each engine, dead ones included."""
        with self._changed:
            return list(self._handles)

    @property
    def closed(self) -> bool:
        """Whether the engines were ended."""
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

    def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds until an engine's state has changed."""
        with self._changed:
            self._changed.wait(timeout)

    # ---------------------------------------------------------------- requests

    def acquire(self, requests: int) -> Engine | None:
        """Add ``requests`` to the least busy serving engine and return it; ``None`` if there is none."""
        now = time.monotonic()
        with self._changed:
            able = [
                handle
                for handle in self._handles
                if handle.takes_requests(now) and handle.num_requests < self.max_requests
            ]
            if not able:
                return None
            best = min(able, key=lambda one: (one.num_requests, (one.number - self._first) % self.num_engines))
            best.num_requests += requests
            return best

    def release(self, handle: Engine, requests: int) -> None:
        """Count requests as no longer in flight: answered, lost or cancelled."""
        with self._changed:
            handle.num_requests -= requests
            self._changed.notify_all()

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
                results = EngineCalls(calls, doing, timeout).result()
            except EngineFailure as error:
                self.mark_dead(error.engine, str(error), cause=error.cause)
            else:
                for handle in handles:
                    handle.has_worked |= state is State.SERVING
                return dict(zip((handle.number for handle in handles), results, strict=True))
