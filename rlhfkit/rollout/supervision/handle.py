"""``EngineHandle``: one engine process, from its start to its end, and calls to several of them at once."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, RefusedRequest, RequestError
from rlhfkit.rollout.supervision.health import HealthPolicy, Probes, State, may_follow


class EngineHandle:
    """An engine process. When it dies, another with the same number takes its place; this one stays dead.

    Args:
        number: Of the engine in its manager.
        size: Engines of the manager, for messages.
        actor: The Ray actor; its ``start`` was called.
        started: Will hold what ``start`` returns.
        restarts: Processes that this engine has used up before.
        policy: How it is watched.
        start_timeout: Seconds that it may take to start.
    """

    def __init__(
        self,
        number: int,
        size: int,
        actor: Any,
        started: Any,
        restarts: int,
        policy: HealthPolicy,
        start_timeout: float,
    ) -> None:
        self.number = number
        self.size = size
        self.actor = actor
        self.started = started
        self.restarts = restarts
        self.start_by = time.monotonic() + start_timeout
        self.state = State.STARTING
        self.probes = Probes(policy, time.monotonic())
        self.probe: Any = None
        """Will hold the answer to the open question."""
        self.silent = 0.0
        """Seconds since its model's process made a step, as it said last."""
        self.paused = False
        """Whether it computed nothing on purpose, as it said last."""
        self.load = 0
        """Requests it was given and has not answered, of all callers."""
        self.version: int | None = None
        """Of the weights it serves."""
        self.dirty = False
        """A transfer broke off: its weights are garbage until the next."""
        self.asleep = False
        """It has given up memory, and must be woken before it is sent weights."""
        self.info: dict[str, Any] = {}
        """What ``start`` returned: ``pid``, ``node``, ``processes``, ``max_model_len``."""
        self.reason = ""
        """Why it died."""

    def __str__(self) -> str:
        pid = self.info.get("pid")
        return f"vLLM engine {self.number} of {self.size}" + (f" (process {pid})" if pid else "")

    def become(self, state: State) -> None:
        """Change state.

        Args:
            state: The new one.

        Raises:
            RuntimeError: If no such change exists, which is a bug of ours.
        """
        if not may_follow(self.state, state):
            raise RuntimeError(f"{self} is {self.state.value} and cannot become {state.value}")
        self.state = state

    def takes_requests(self, now: float) -> bool:
        """Whether it may be given requests: it serves, and has not missed a probe.

        Args:
            now: Seconds, monotonic.
        """
        return self.state is State.SERVING and not self.probes.missed(now)

    def describe(self, now: float) -> str:
        """One line for reports.

        Args:
            now: Seconds, monotonic.
        """
        words = f"{self}: {self.state.value}"
        if self.reason:
            words += f" ({self.reason})"
        if self.state not in (State.STARTING, State.DEAD):
            words += (
                f", version {self.version}, {self.load} requests, answered {now - self.probes.last_answer:.1f} s ago"
                f" ({'paused' if self.paused else f'last step {self.silent:.1f} s before'})"
            )
        return words + (f", restarted {self.restarts} times" if self.restarts else "")


def fetch(ref: Any, handle: EngineHandle, doing: str) -> Any:
    """The result of a call that has ended.

    Args:
        ref: What :func:`ray.wait` found ready.
        handle: Where it ran.
        doing: For the message.

    Raises:
        RequestError: If vLLM refused what was asked.
        EngineFailure: If the engine failed or died.
    """
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause, failure = error.cause, None
        if isinstance(cause, RefusedRequest):
            failure = RequestError(f"{handle} refused a request while {doing}: {cause}")
    except ray.exceptions.RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineFailure(
            f"{handle} died while {doing} (is the machine out of memory?): {reason} {CURE}", handle
        ) from None
    raise failure or EngineFailure(f"{handle} failed while {doing}: {cause}. {CURE}", handle)


class RemoteCall:
    """One method called on several engines, under way.

    Args:
        waiting: What will hold the result, and the engine it comes from.
        doing: What the engines do, for messages: "loading weights".
        timeout: Seconds from now.
    """

    def __init__(self, waiting: dict[Any, EngineHandle], doing: str, timeout: float) -> None:
        self._waiting = waiting
        self._results: dict[int, Any] = {}
        self._doing, self._timeout = doing, timeout
        self._deadline = time.monotonic() + timeout

    def poll(self) -> None:
        """Raise if an engine has failed already."""
        self._collect(0.0)

    def result(self) -> list[Any]:
        """Results in the order of the engines.

        Raises:
            EngineError: If an engine failed, or the time is up.
        """
        while self._waiting:
            left = self._deadline - time.monotonic()
            if left <= 0:
                late = sorted(handle.number for handle in self._waiting.values())
                raise EngineError(
                    f"vLLM engine(s) {late} did not finish {self._doing} within {self._timeout:g} s: stopped, "
                    f"overloaded, or the limit is too low (VLLMPool(..._timeout=...)). {CURE}"
                )
            self._collect(min(left, 1.0))
        return [self._results[number] for number in sorted(self._results)]

    def _collect(self, timeout: float) -> None:
        """Take what is ready, waiting for at least one."""
        import ray

        if not self._waiting:
            return
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=timeout)
        for ref in ready:
            handle = self._waiting.pop(ref)
            self._results[handle.number] = fetch(ref, handle, self._doing)
        for handle in self._waiting.values():  # Ray may need a while to notice that a machine is gone
            if handle.state is State.DEAD:
                raise EngineFailure(f"{handle} died while {self._doing}: {handle.reason}. {CURE}", handle)


@dataclass(frozen=True)
class EngineHandles:
    """Several engines: what a weight sender sees of a manager
    (:class:`~rlhfkit.rollout.weight_sync.sender.Receivers`).
    """

    handles: tuple[EngineHandle, ...]
    workers_each: int
    """Processes that hold weights, per engine."""
    address: str
    """Where they reach this process."""
    timeout: float
    """Seconds for each step of a weight transfer."""

    @property
    def num_workers(self) -> int:
        """Processes that hold weights."""
        return len(self.handles) * self.workers_each

    def submit(
        self,
        method: str,
        *args: Any,
        doing: str,
        timeout: float | None = None,
        each: Sequence[tuple[Any, ...]] | None = None,
    ) -> RemoteCall:
        """Call a method on every one.

        Args:
            method: Of :class:`~rlhfkit.rollout.vllm.actor.VLLMActor`.
            *args: Same for all.
            doing: For messages.
            timeout: Seconds; ``None``: those of a step of a transfer.
            each: Arguments per engine instead.
        """
        refs = {}
        for place, handle in enumerate(self.handles):
            refs[getattr(handle.actor, method).remote(*(args if each is None else each[place]))] = handle
        return RemoteCall(refs, doing, self.timeout if timeout is None else timeout)

    def connect(self, rendezvous: dict[str, Any], *, ranked: bool = True) -> RemoteCall:
        """Have every worker get ready for transfers.

        Args:
            rendezvous: What it is told.
            ranked: The workers join a group, in which those of the i-th engine are ranks 1 + i * ``workers_each`` on;
                each engine is told its first as ``rank_offset``.
        """
        offsets = [{"rank_offset": 1 + i * self.workers_each} if ranked else {} for i in range(len(self.handles))]
        each = [(rendezvous | offset,) for offset in offsets]
        return self.submit("connect", doing="joining the weight transfer", each=each)

    def update(self, update: dict[str, Any]) -> RemoteCall:
        """Have every worker receive."""
        return self.submit("update", update, doing="loading weights")


def kill_processes(processes: Iterable[tuple[int, float]]) -> None:
    """SIGKILL processes of this machine, also stopped ones.

    Args:
        processes: Number and time of creation of each, as a number may belong to another by now.
    """
    import contextlib

    import psutil

    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created) < 1.0:
                process.kill()
