"""``EngineHandle``: one engine process, from start to death, and remote calls to several of them at once.

:class:`RoutedEngine` is the part of it that every rank knows.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfkit.ray_calls import ActorCalls
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, RefusedRequest, RequestError
from rlhfkit.rollout.supervision.health import HealthPolicy, Probes, State, can_follow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Request = tuple[list[int], dict[str, Any]]
"""Prompt token ids and the engine's own sampling parameters; ``priority`` among them, of which the lowest is next."""


class Completion(NamedTuple):
    """What an engine has sampled for one request of T tokens; arrays, as lists take five times as long to send."""

    token_ids: "NDArray[np.int32]"
    """(T,)."""
    logprobs: "NDArray[np.float32]"
    """(T,)."""
    finish_reason: str
    version_runs: list[tuple[int, int]]
    """Versions of the weights that sampled the tokens, as (version, number of tokens) of each run of equal ones."""


ENGINE_NAMESPACE = "rlhfkit-engines"
"""Ray's namespace of all engines' actors."""

ActorFactory = Callable[[int, str], Any]
"""Creates the Ray actor of the engine with this number, the first time and when it is restarted.

It gets the given name in :data:`ENGINE_NAMESPACE`, by which the other ranks find it. It is not detached, so that it
ends with rank 0.
"""


class RoutedEngine:
    """One process of an engine, as the requests of one rank see it.

    ``actor`` has the methods of :class:`~rlhfkit.rollout.vllm.actor.VLLMActor`; ``actor_name`` is its name in Ray,
    which no other process gets.
    """

    def __init__(self, name: str, number: int, actor: Any, actor_name: str) -> None:
        self.name = name
        self.number = number
        self.actor = actor
        self.actor_name = actor_name
        self.state = State.STARTING
        self.num_requests = 0
        """Requests in flight, of all callers of this rank."""
        self.version: int | None = None
        """Version of the weights it serves."""
        self.reason = ""
        """Why it died."""
        self.will_restart = False
        """Whether it is dead and another process will get its number."""
        self.has_worked = False
        """Whether it has answered a request of this rank."""
        self.earlier_failure = ""
        """Why the process before it died; empty if it is the first of its number."""

    def __str__(self) -> str:
        return self.name

    def takes_requests(self, now: float) -> bool:
        """Whether it serves and has missed no probe."""
        return self.state is State.SERVING

    def describe(self, now: float) -> str:
        """Describe the state in one line."""
        words = f"{self}: {self.state.value}" + (f" ({self.reason})" if self.reason else "")
        words += f", version {self.version}, {self.num_requests} requests of this rank"
        return words + (f", restarted because: {self.earlier_failure}" if self.earlier_failure else "")


class EngineHandle(RoutedEngine):
    """An engine's process, as rank 0 manages it. When it dies a new one, with a new handle, gets the same number.

    The actor's ``start`` was called, with the Ray reference ``start_ref``; ``restarts`` counts its earlier processes;
    ``start_timeout`` is in seconds.
    """

    def __init__(
        self,
        name: str,
        number: int,
        actor: Any,
        start_ref: Any,
        restarts: int,
        policy: HealthPolicy,
        start_timeout: float,
        actor_name: str = "",
    ) -> None:
        super().__init__(name, number, actor, actor_name)
        self.start_ref = start_ref
        self.restarts = restarts
        self.start_deadline = time.monotonic() + start_timeout
        self.probes = Probes(policy, time.monotonic())
        self.probe_ref: Any = None
        """Ray's reference to the answer of the open probe."""
        self.seconds_since_step = 0.0
        """From its last answer."""
        self.paused = False
        """From its last answer."""
        self.sleep_level: int | None = None
        """While it is starting: the level at which it sleeps, as the others do, once ``start_ref`` has ended."""
        self.has_partial_weights = False
        """Whether its last weight transfer broke off, so that its weights are unusable until the next."""
        self.asleep = False
        """Whether it has freed memory and must be woken before it is sent weights."""
        self.cause = ""
        """The error that it raised when it failed, numbers left out; empty if it ended."""
        self.earlier_cause = ""
        """The same of the process before it."""
        self.postponed = False
        """Whether it is dead and will be restarted when the engines wake."""
        self.info: dict[str, Any] = {}
        """What ``start`` returned: ``pid``, ``node``, ``processes``, ``max_model_len``, ``vocabulary``."""

    def __str__(self) -> str:
        pid = self.info.get("pid")
        return self.name + (f" (process {pid})" if pid else "")

    def change_state(self, state: State) -> None:
        """Change the state; an invalid transition is a bug and raises RuntimeError."""
        if not can_follow(self.state, state):
            raise RuntimeError(f"{self} is {self.state.value} and cannot become {state.value}")
        self.state = state

    def takes_requests(self, now: float) -> bool:
        """Whether it serves and has missed no probe."""
        return self.state is State.SERVING and not self.probes.missed(now)

    def describe(self, now: float) -> str:
        """Describe the state in one line."""
        words = f"{self}: {self.state.value}"
        if self.reason:
            words += f" ({self.reason})"
        if self.state not in (State.STARTING, State.DEAD):
            step = "paused" if self.paused else f"last step {self.seconds_since_step:.1f} s before"
            answered = now - self.probes.last_answer
            words += f", version {self.version}, {self.num_requests} requests of rank 0"
            words += f", answered {answered:.1f} s ago ({step})"
        if self.restarts:
            words += f", restarted {self.restarts} times"
        return words + (f", the last time because: {self.earlier_failure}" if self.earlier_failure else "")


def fetch(ref: Any, handle: RoutedEngine, doing: str) -> Any:
    """Return the result of a remote call that has ended; ``doing`` names the work in messages.

    Raises RequestError if the engine refused a request, EngineFailure if it failed or died.
    """
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause, failure = error.cause, None
        if isinstance(cause, RefusedRequest):
            failure = RequestError(f"{handle} refused a request while {doing}: {cause}")
    except ray.exceptions.RayError as error:
        reason = _first_and_exit_detail(str(error).strip() or type(error).__name__)
        raise EngineFailure(
            f"{handle} died while {doing} (is the machine out of memory?): {reason} {CURE}", handle
        ) from None
    raise failure or EngineFailure(f"{handle} failed while {doing}: {cause}. {CURE}", handle, str(cause))


def _first_and_exit_detail(message: str) -> str:
    """The first line of Ray's message on a dead actor, and the one that says how its process ended, if there is one."""
    lines = message.splitlines()
    return " ".join([lines[0], *(line.strip() for line in lines[1:] if "exit detail" in line)])


class EngineCalls(ActorCalls[RoutedEngine]):
    """One method called on several engines, in flight."""

    def fetch(self, ref: Any, actor: RoutedEngine) -> Any:
        """Return the result of a call that has ended; see :func:`fetch` for what it raises."""
        return fetch(ref, actor, self.doing)

    def late(self, actors: Sequence[RoutedEngine]) -> Exception:
        """Make the error of engines that have not answered in time."""
        names = ", ".join(sorted(map(str, actors)))
        return EngineError(
            f"{names} did not finish {self.doing} within {self.timeout:g} s: stopped, overloaded, or the limit is too "
            f"low (VLLMPool(..._timeout=...)). {CURE}"
        )

    def check(self, actors: Sequence[RoutedEngine]) -> None:
        """Raise EngineFailure if an engine was found dead: Ray may need a while to notice that a machine is gone."""
        for handle in actors:
            if handle.state is State.DEAD:
                raise EngineFailure(f"{handle} died while {self.doing}: {handle.reason}. {CURE}", handle)


@dataclass(frozen=True)
class EngineHandles:
    """Several engines as a :class:`~rlhfkit.rollout.weight_sync.sender.Receivers`."""

    handles: tuple[EngineHandle, ...]
    workers_per_engine: int
    """Processes of each engine that hold weights."""
    address: str
    """Address at which they reach this process."""
    timeout: float
    """Seconds for each step of a weight transfer."""

    @property
    def num_workers(self) -> int:
        """Processes that hold weights, of all engines."""
        return len(self.handles) * self.workers_per_engine

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Number of each of these processes among those of all engines: colocated, the rank whose GPU it uses."""
        each = self.workers_per_engine
        return tuple(handle.number * each + index for handle in self.handles for index in range(each))

    def worker(self, rank: int) -> str:
        """Name the engine whose worker has a rank from 1 on in the group of a transfer."""
        return str(self.handles[(rank - 1) // self.workers_per_engine])

    def submit(
        self,
        method: str,
        *args: Any,
        doing: str,
        timeout: float | None = None,
        each: Sequence[tuple[Any, ...]] | None = None,
    ) -> EngineCalls:
        """Call a method on every engine, with ``args`` or with the engine's own arguments in ``each``.

        ``doing`` names the work in messages; ``timeout`` is in seconds, by default :attr:`timeout`.
        """
        refs = {}
        for place, handle in enumerate(self.handles):
            refs[getattr(handle.actor, method).remote(*(args if each is None else each[place]))] = handle
        return EngineCalls(refs, doing, self.timeout if timeout is None else timeout)

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> EngineCalls:
        """Have every worker prepare for transfers.

        If ``ranked``, the workers of engine i get ranks from 1 + i * ``workers_per_engine``, its ``rank_offset``, on.
        """
        offsets = [{"rank_offset": 1 + i * self.workers_per_engine} if ranked else {} for i in range(len(self.handles))]
        each = [(init_info | offset,) for offset in offsets]
        return self.submit("connect", doing="joining the weight transfer", each=each)

    def update(self, update_info: dict[str, Any]) -> EngineCalls:
        """Have every worker receive weights."""
        return self.submit("update", update_info, doing="loading weights")


def kill_processes(processes: Iterable[tuple[int, float]]) -> None:
    """Send SIGKILL to local processes, also suspended ones, by pid and creation time (a pid may be reused)."""
    import psutil

    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created) < 1.0:
                process.kill()
