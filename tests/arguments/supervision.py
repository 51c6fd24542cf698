"""What a ``VLLMPool`` would start vLLM with and how it would watch it, looked at without vLLM."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfkit import SamplingSpec, VLLMPool
from rlhfkit.rollout import HealthPolicy
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.placement import ActorPlacement
from rlhfkit.rollout.remote.scheduler import RequestScheduler
from rlhfkit.rollout.supervision import health_monitor
from rlhfkit.rollout.supervision.handle import EngineHandle
from rlhfkit.rollout.supervision.health import Probes, State
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.vllm import pool


class Idle(EngineManager):
    """A manager in every respect, but its engines have no processes: they are up at once, and two scores differ."""

    def _launch(self, number: int, restarts: int) -> EngineHandle:
        return EngineHandle(number, len(self._places), None, None, restarts, self.policy, self._start_timeout)

    def start(self) -> None:
        self.asked: list[Any] = []
        self.max_model_len, self.vocabulary = 64, 128
        self._handles.extend(self._launch(number, 0) for number in range(len(self._places)))
        for handle in self._handles:
            self.is_up(handle, {})

    def ask(self, state: State, method: str, *args: Any, doing: str, timeout: float) -> dict[int, Any]:
        self.asked.append((method, args, timeout))
        return {0: [[-1.0]], 1: [[-1.05]]}


def started(folder: Path, arguments: Mapping[str, Any]) -> Any:
    """All that a pool hands to its engines, their sender and those who wait for them; or its error."""
    engines = VLLMPool(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "EngineManager", Idle)
        try:
            engines.start(str(folder / "chat"), dtype=torch.float32, load_weights=True)
            manager: Any = engines._manager
            sender: Any = engines._sender
            stream = engines.stream(SamplingSpec(), iteration=0)
            try:
                score: Any = engines.score([[1, 2]])
            except EngineError as error:
                score = str(error)
            stream.close()
            engines.sleep()
            return {
                "vllm": (manager._arguments, manager._environment, manager._in_process, manager._workers_each),
                "limits": (manager._start_timeout, manager._sync_timeout, manager.policy),
                "waits": stream._jobs._watchdog._timeout,
                "places": [(*place_of(place), place.environment) for place in manager._places],
                "sender": (type(sender).__name__, sender.bucket_bytes, getattr(sender, "timeout", None)),
                "score": score,
                "asked": manager.asked,
            }
        except (ValueError, TypeError, RuntimeError) as error:
            return {"error": str(error)}
        finally:
            engines.close()


def place_of(place: ActorPlacement) -> tuple[Any, ...]:
    """What is asked of Ray for an engine."""
    strategy = place.options["scheduling_strategy"]
    return place.options["num_cpus"], place.options["num_gpus"], type(strategy).__name__


def fleet_of(policy: HealthPolicy, *, serves_at_once: bool) -> Idle:
    """One engine, up."""
    manager = Idle(
        [ActorPlacement({})], {}, in_process=True, environment={}, workers_each=1, sync_timeout=1.0, start_timeout=1.0,
        policy=policy, serves_at_once=serves_at_once,
    )  # fmt: skip
    manager.start()
    return manager


def watched(arguments: Mapping[str, Any]) -> Any:
    """When an engine is asked and given up, how often it is started again, and how long is waited for it."""
    import ray

    policy = HealthPolicy(**arguments)
    probes, seconds = Probes(policy, 0.0), range(60)
    due = [probes.due(now) for now in seconds]
    probes.asked(0.0)
    missed = [(probes.missed(now), probes.dead(now)) for now in seconds]
    manager = fleet_of(policy, serves_at_once=True)
    (silent,) = manager.handles
    health_monitor._take_answer(manager, silent, ray.put({"silent": 200.0, "paused": False}))
    given_up = silent.state
    manager.close()
    return due, missed, given_up, lives(policy), attempts(policy), patience(policy)


def lives(policy: HealthPolicy) -> int:
    """Processes of an engine that always dies."""
    manager = fleet_of(policy, serves_at_once=True)
    count = 0
    while not manager.hopeless:
        manager.mark_dead(manager.handles[0], "it dies")
        count += 1
    return count


def attempts(policy: HealthPolicy) -> int:
    """Times that a request which kills engines is given out."""
    manager = fleet_of(policy, serves_at_once=False)
    jobs = RequestScheduler(manager, timeout=1e9)
    job = jobs.add([{}])  # type: ignore[list-item]
    count = 0
    try:
        while True:
            count += 1
            jobs._failed(job, manager.handles[0], "it dies")
    except EngineError:
        return count
    finally:
        jobs.close()
        manager.close()


def patience(policy: HealthPolicy) -> tuple[str, int]:
    """What becomes of requests that no engine has served for 30 seconds, and the reports after 200 seconds."""
    manager = fleet_of(policy, serves_at_once=False)
    jobs = RequestScheduler(manager, timeout=1e9)
    jobs._unserved = time.monotonic() - 30.0
    jobs._watchdog._last -= 200.0
    outcome = "waits"
    try:
        jobs._check()
    except EngineError as error:
        outcome = type(error).__name__
    jobs.close()
    manager.close()
    return outcome, jobs._watchdog._reports
