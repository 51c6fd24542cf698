"""``EngineTable``: the states of a pool's engines in one place, which all ranks ask alike.

Every engine is a Ray actor that Ray itself starts again when its process ends, under the same handle. A process keeps
nothing but weights, so the table only has to know how far the present one is: it starts the engine in it, probes it,
kills it when it does not answer, and decides whether the next one may serve.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure
from rlhfkit.rollout.supervision.calls import call_error, late_error
from rlhfkit.rollout.supervision.health import HealthPolicy, Probes, State, can_follow

log = logging.getLogger(__name__)

UP = (State.STALE, State.SERVING, State.ASLEEP)
"""States in which an engine can be sent weights."""
Process = tuple[int, int]
"""Number of an engine, and of its earlier processes: names one process of it."""
_TICK_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """What is fixed for the engines of a pool; times are in seconds."""

    num_engines: int
    sync_timeout: float
    """For each step of a weight transfer."""
    start_timeout: float
    """For a start or restart."""
    policy: HealthPolicy
    """How engines are probed and how often they are restarted."""
    engine_name: str = "vLLM engine"
    """What one is called in messages."""
    workers_per_engine: int = 1
    """Processes of each engine that hold weights."""
    has_weights: bool = False
    """Engines serve the model's own weights, as version 0, once started."""


@dataclass(eq=False)
class EngineStatus:
    """One process of an engine, as all who use it learn of it."""

    name: str
    number: int
    restarts: int = 0
    state: State = State.STARTING
    version: int | None = None
    """Version of the weights it serves."""
    reason: str = ""
    """Why it died."""
    earlier_failure: str = ""
    """Why the process before it died; empty if it is the first of its number."""
    will_restart: bool = False
    """Whether it is dead and another process will get its number."""
    responsive: bool = True
    """Whether it has missed no health probe."""
    asleep: bool = False
    """Whether it has freed memory and must be woken before it is sent weights."""
    has_partial_weights: bool = False
    """Whether its last weight transfer broke off, so that its weights are unusable until the next."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the engine's ``identify`` and ``start`` have returned."""
    description: str = ""

    def __str__(self) -> str:
        pid = self.info.get("pid")
        return self.name + (f" (process {pid})" if pid else "")

    @property
    def process(self) -> Process:
        """Names this process to the table."""
        return self.number, self.restarts


@dataclass(frozen=True)
class Snapshot:
    """All engines of a pool; ``number`` counts the changes."""

    number: int
    engines: tuple[EngineStatus, ...]
    closed: bool


class EngineProcess(EngineStatus):
    """One process of an engine, from start to death; ``before`` is the process that Ray has started it for."""

    def __init__(self, number: int, actor: Any, settings: PoolSettings, before: "EngineProcess | None" = None) -> None:
        super().__init__(f"{settings.engine_name} {number} of {settings.num_engines}", number)
        self.actor = actor
        self.cause = ""
        """The error that it raised when it failed, numbers left out; empty if it ended."""
        self.earlier_cause = ""
        if before is not None:
            self.restarts = before.restarts + 1
            self.earlier_failure, self.earlier_cause = before.reason, before.cause
        self.probes = Probes(settings.policy, time.monotonic())
        self.postponed = False
        """Whether the next process is started when the engines wake."""
        self.has_worked = False
        """Whether it has answered a request."""
        self.seconds_since_step = 0.0
        """From its last answer."""
        self.paused = False
        """From its last answer."""

    def change_state(self, state: State) -> None:
        """Change the state; an invalid transition is a bug and raises RuntimeError."""
        if not can_follow(self.state, state):
            raise RuntimeError(f"{self} is {self.state.value} and cannot become {state.value}")
        self.state = state

    def status(self) -> EngineStatus:
        now = time.monotonic()
        self.responsive, self.description = not self.probes.missed(now), self._description(now)
        return EngineStatus(*(getattr(self, one.name) for one in fields(EngineStatus)))

    def _description(self, now: float) -> str:
        words = f"{self}: {self.state.value}"
        if self.reason:
            words += f" ({self.reason})"
        if self.state not in (State.STARTING, State.DEAD):
            step = "paused" if self.paused else f"last step {self.seconds_since_step:.1f} s before"
            words += f", version {self.version}, answered {now - self.probes.last_answer:.1f} s ago ({step})"
        if self.restarts:
            words += f", restarted {self.restarts} times"
        return words + (f", the last time because: {self.earlier_failure}" if self.earlier_failure else "")


class EngineTable:
    """The engines of a pool; ``actors`` are theirs, by number, and Ray restarts them without a limit of its own.

    An asynchronous actor of Ray, or, for a single rank, an object whose coroutines run in a thread of that rank.
    """

    def __init__(self, actors: Sequence[Any], settings: PoolSettings) -> None:
        self._actors = list(actors)
        self._settings = settings
        self._engines = [EngineProcess(number, actor, settings) for number, actor in enumerate(actors)]
        self._has_weights = settings.has_weights
        self._sleep_level: int | None = None  # while engines sleep
        self._limits = (0, 0)
        self._number = 0
        self._change = asyncio.Event()  # one for each change
        self._closed = False
        self._lives: list[asyncio.Task[None]] = []

    # ---------------------------------------------------------------- what all ranks ask

    async def constants(self) -> tuple[list[Any], PoolSettings, tuple[int, int]]:
        """Return what never changes: actors, settings, and the fewest tokens of context and vocabulary of an engine."""
        return self._actors, self._settings, self._limits

    async def snapshot(self) -> Snapshot:
        return Snapshot(self._number, tuple(engine.status() for engine in self._engines), self._closed)

    async def changes(self, since: int) -> Snapshot:
        """Return the states of all engines once they are others than in snapshot ``since``."""
        while self._number == since:
            await self._change.wait()
        return await self.snapshot()

    async def mark_dead(self, process: Process, reason: str, cause: str = "") -> None:
        """Mark a process dead and kill it; no effect if another has its number already.

        ``cause`` is the error that it raised; empty if it ended or does not answer.
        """
        for engine in self._present([process]):
            self._mark_dead(engine, reason, cause)

    async def has_worked(self, process: Process) -> None:
        for engine in self._present([process]):
            engine.has_worked = True

    def _present(self, processes: Iterable[Process]) -> list[EngineProcess]:
        return [self._engines[number] for number, restarts in processes if self._engines[number].restarts == restarts]

    def _changed(self) -> None:
        self._number += 1
        change, self._change = self._change, asyncio.Event()
        change.set()

    def _report(self) -> str:
        return "\n".join(f"  {engine.status().description}" for engine in self._engines)

    # ---------------------------------------------------------------- start and end

    async def start(self) -> None:
        """Start all engines and watch them from then on; EngineError as soon as one fails or is late."""
        starting = [asyncio.ensure_future(self._start(engine)) for engine in self._engines]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        infos = [engine.info for engine in self._engines]
        self._limits = min(info["max_model_len"] for info in infos), min(info["vocabulary"] for info in infos)
        self._lives = [asyncio.ensure_future(self._watch(engine)) for engine in self._engines]

    async def close(self) -> None:
        """Kill all engines; callers that wait for one get an error."""
        self._closed = True
        for life in self._lives:
            life.cancel()
        for engine in self._engines:
            if engine.state is not State.DEAD:
                engine.reason, engine.will_restart = "the pool was closed", False
                engine.change_state(State.DEAD)
            _kill(engine)
        self._changed()

    def _succeed(self, before: EngineProcess) -> None:
        engine = EngineProcess(before.number, before.actor, self._settings, before)
        self._engines[before.number] = engine
        self._lives.append(asyncio.ensure_future(self._live(engine, before)))
        self._changed()

    async def _live(self, engine: EngineProcess, before: EngineProcess) -> None:
        try:
            await self._start(engine, before)
        except Exception as error:
            self._has_failed(engine, error)
        await self._watch(engine)

    async def _start(self, engine: EngineProcess, before: EngineProcess | None = None) -> None:
        """Start an engine in its process. If the others sleep meanwhile, it falls asleep first."""
        settings, actor = self._settings, engine.actor
        doing = "starting again" if before else "starting (importing packages and building the model)"
        deadline = time.monotonic() + settings.start_timeout
        while not engine.info or (before is not None and engine.info["worker"] == before.info.get("worker")):
            # Ray repeats the call until a process has answered it.
            asked = actor.identify.options(max_task_retries=-1).remote()
            engine.info = await _answer(asked, engine, doing, deadline - time.monotonic())
            await asyncio.sleep(0.02)
        if before is not None:
            engine.earlier_failure += _exit_detail(before)
        started = await _answer(actor.start.remote(self._has_weights), engine, doing, deadline - time.monotonic())
        engine.info = engine.info | started
        slept: int | None = None
        while slept != self._sleep_level:
            slept = self._sleep_level
            call = actor.wake.remote() if slept is None else actor.sleep.remote(slept)
            await _answer(call, engine, "waking up" if slept is None else "falling asleep", settings.sync_timeout)
        if engine.state is State.DEAD:
            return
        engine.probes.answered(time.monotonic())
        engine.change_state(State.STALE)
        if self._has_weights:
            engine.version = 0
            engine.change_state(State.SERVING)
        if slept is not None:
            self._falls_asleep(engine, slept)
        self._changed()

    @staticmethod
    def _falls_asleep(engine: EngineProcess, level: int) -> None:
        engine.change_state(State.ASLEEP)
        engine.asleep = True
        engine.version = engine.version if level == 1 else None

    # ---------------------------------------------------------------- weights and sleep

    async def wait_until_up(self, wait_for_all: bool = False) -> None:
        """Wait until an engine can be sent weights; with ``wait_for_all``, until none is starting.

        Raises EngineError if none is up within ``start_timeout``.
        """
        self._restart_postponed()
        deadline = time.monotonic() + self._settings.start_timeout + self._settings.policy.detection_seconds
        while True:
            up = any(engine.state in UP for engine in self._engines)
            starting = any(engine.state is State.STARTING or engine.will_restart for engine in self._engines)
            if up and not (wait_for_all and starting):
                return
            if self._closed or not starting or time.monotonic() >= deadline:
                raise EngineError(f"no engine is there to be sent weights:\n{self._report()}\n{CURE}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), 1.0)

    async def begin_sync(self) -> list[Process]:
        """Take the engines that are up out of service for new weights; those that are starting get the next."""
        await self.wait_until_up()
        self._has_weights, self._sleep_level = False, None
        up = [engine for engine in self._engines if engine.state in UP]
        for engine in up:
            engine.version = None
            engine.change_state(State.SYNCING)
        self._changed()
        return [engine.process for engine in up]

    async def end_sync(self, processes: Sequence[Process], version: int | None, asleep: bool) -> None:
        """Return engines to service with ``version``; ``None``: the transfer failed and their weights are unusable.

        ``asleep``: they have their weights, and serve after :meth:`wake`.
        """
        complete = State.ASLEEP if asleep else State.SERVING
        for engine in self._present(processes):
            if engine.state is State.SYNCING:
                engine.version, engine.has_partial_weights = version, version is None
                engine.asleep = engine.asleep if version is None else asleep
                engine.change_state(State.STALE if version is None else complete)
        self._changed()

    async def sleep(self, level: int) -> None:
        """Have engines that are up free GPU memory: vLLM's level 1 keeps weights in main memory, 2 drops them."""
        self._sleep_level = level
        for engine in self._engines:
            if engine.state in (State.SERVING, State.STALE):
                self._falls_asleep(engine, level)
        self._changed()
        await self._call_sleeping("sleep", level, doing="falling asleep")

    async def wake(self) -> None:
        """Have every sleeping engine allocate its memory; those that kept their weights serve.

        Engines that died while the others slept are started again.
        """
        self._sleep_level = None
        self._restart_postponed()
        await self._call_sleeping("wake", doing="waking up")
        for engine in self._engines:
            if engine.state is State.ASLEEP:
                engine.asleep = False
                engine.change_state(State.STALE if engine.version is None else State.SERVING)
        self._changed()

    async def _call_sleeping(self, method: str, *args: Any, doing: str) -> None:
        engines = [engine for engine in self._engines if engine.state is State.ASLEEP]
        calls = [
            _answer(getattr(one.actor, method).remote(*args), one, doing, self._settings.sync_timeout)
            for one in engines
        ]
        for engine, outcome in zip(engines, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(outcome, EngineFailure):
                self._has_failed(engine, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _restart_postponed(self) -> None:
        for engine in self._engines:
            if engine.postponed:
                engine.postponed = False
                self._succeed(engine)

    # ---------------------------------------------------------------- probes and deaths

    async def _watch(self, engine: EngineProcess) -> None:
        """Probe a process until it is dead."""
        answer: asyncio.Future[Any] | None = None
        before, missed, probes = time.monotonic(), 0, engine.probes
        while engine.state is not State.DEAD:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            if now - before > 4 * _TICK_SECONDS:  # this process was suspended and could not read answers
                probes.discount(now - before)
            before = now
            try:
                if answer is not None and answer.done():
                    self._take_answer(engine, answer)
                    answer = None
                elif probes.failed(now):
                    self._mark_dead(engine, f"it did not answer for {now - probes.last_answer:.0f} s")
                elif probes.due(now):
                    answer = asyncio.wrap_future(engine.actor.health.remote().future())
                    probes.sent(now)
            except Exception:
                log.exception("probing %s failed; it is tried again", engine)
            if missed != (missed := probes.missed(now)):
                self._changed()

    async def probe_now(self, processes: Sequence[Process]) -> bool:
        """Probe engines at once, after a failure; returns whether any of ``processes`` is dead."""
        policy = self._settings.policy
        limit = policy.probe_timeout * policy.probe_failures
        up = [one for one in self._present(processes) if one.state not in (State.DEAD, State.STARTING)]
        answers = {asyncio.wrap_future(one.actor.health.remote().future()): one for one in up}
        if answers:
            await asyncio.wait(answers, timeout=limit)
        for answer, engine in answers.items():
            if answer.done():
                self._take_answer(engine, answer)
            else:
                self._mark_dead(engine, f"it did not answer for {limit:g} s")
        alive = [engine for engine in self._present(processes) if engine.state is not State.DEAD]
        return len(alive) < len(processes)

    def _take_answer(self, engine: EngineProcess, answer: "asyncio.Future[Any]") -> None:
        error = answer.exception()
        if error is not None:
            self._has_failed(engine, call_error(error, engine, "answering a health probe"))
            return
        health = answer.result()
        engine.probes.answered(time.monotonic())
        engine.seconds_since_step, engine.paused = health["seconds_since_step"], health["paused"]
        if engine.seconds_since_step > self._settings.policy.step_timeout:
            self._mark_dead(engine, f"its model has not made a step for {engine.seconds_since_step:.0f} s")

    def _has_failed(self, engine: EngineProcess, error: Exception) -> None:
        words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        self._mark_dead(engine, words, error.cause if isinstance(error, EngineFailure) else "")

    def _mark_dead(self, engine: EngineProcess, reason: str, cause: str = "") -> None:
        """Mark a process dead and kill it; the next one is started within ``max_restarts``.

        While the engines sleep, and training has the memory, it is started when they are needed again. It is not
        started if this one raised the same error as the process before it, and has answered no request since.
        """
        cause = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        if engine.state is State.DEAD:
            return
        engine.reason, engine.cause = reason.replace(CURE, "").strip(), cause
        repeated = bool(cause) and cause == engine.earlier_cause and not engine.has_worked
        if repeated:
            engine.reason += " (the process before it failed in the same way)"
        engine.will_restart = engine.restarts < self._settings.policy.max_restarts and not (self._closed or repeated)
        engine.postponed = engine.will_restart and self._sleep_level is not None
        engine.change_state(State.DEAD)
        self._changed()
        _kill(engine)
        if engine.will_restart and not engine.postponed:
            self._succeed(engine)


async def _answer(ref: Any, engine: EngineProcess, doing: str, timeout: float) -> Any:
    """Return what an engine answers to a call, within ``timeout`` seconds."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout)
    except TimeoutError:
        raise late_error([engine], doing, timeout) from None
    except Exception as error:
        raise call_error(error, engine, doing) from None


# ---------------------------------------------------------------- processes


def this_process() -> dict[str, Any]:
    """Return what names the process of an engine, in which it is called, for messages and to kill it."""
    import psutil
    import ray

    context, this = ray.get_runtime_context(), psutil.Process()
    return {
        "pid": this.pid,
        "node": context.get_node_id(),
        "worker": context.get_worker_id(),
        "processes": [(this.pid, this.create_time())],
    }


def _exit_detail(engine: EngineProcess) -> str:
    """What Ray knows of the end of a process, as part of a sentence."""
    import ray
    from ray._private.state import state  # Ray 2.60 tells callers of an actor that it restarts only that it is away
    from ray.core.generated.gcs_pb2 import WorkerTableData

    with contextlib.suppress(Exception):
        worker = ray.WorkerID.from_hex(engine.info["worker"])
        detail = str(WorkerTableData.FromString(state._global_state_accessor.get_worker_info(worker)).exit_detail)
        return f"; {detail.strip()}" if detail.strip() else ""
    return ""


def _kill(engine: EngineProcess) -> None:
    """Kill the processes of an engine in any state, without waiting.

    Ray would ask the actor's to exit, which a suspended one does only seconds later and which leaves its children.
    """
    import ray

    processes = engine.info.get("processes")
    if not processes or not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        if engine.info["node"] == ray.get_runtime_context().get_node_id():
            kill_processes(processes)
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(engine.info["node"], soft=False)
        ray.remote(kill_processes).options(num_cpus=0, scheduling_strategy=there).remote(processes)


def kill_processes(processes: Iterable[tuple[int, float]]) -> None:
    """Send SIGKILL to local processes, also suspended ones, by pid and creation time (a pid may be reused)."""
    import psutil

    for pid, created in processes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(process.create_time() - created) < 1.0:
                process.kill()
