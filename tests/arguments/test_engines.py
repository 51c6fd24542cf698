"""Every argument of every engine but ``LocalEngine``, which is in ``test_rollouts.py``: changed, something is seen.

It is what a ``VLLMPool`` would start vLLM with and how it would supervise it, with engines that are plain objects.
Arguments of episodes and agents are in ``tests/episodes``.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit import SamplingSpec, VLLMPool, VLLMServer
from rlhfkit.rollout import HealthPolicy, ReplayEngine
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.supervision.scheduler import RequestScheduler
from rlhfkit.rollout.supervision.table import PoolSettings
from rlhfkit.rollout.vllm import pool
from rlhfkit.rollout.vllm.actor import ActorLauncher
from rlhfkit.rollout.vllm.placement import ActorPlacement
from rlhfkit.rollout.weight_sync.source import ModuleWeights

from .table import Change, Rows, Unseen, check_none_is_ignored, seen_twice

BESIDE: dict[str, Any] = {"colocate": True}
PROBES = Unseen("against their definition: tests/rollout/supervision/test_health.py")
TABLE: dict[type, Rows] = {
    VLLMPool: {
        "num_engines": Change(2),
        "tensor_parallel_size": Change(2),
        "pipeline_parallel_size": Change(2),
        "data_parallel_size": Change(2, refused=True),  # the model has no experts
        "expert_parallel": Change(True, given={"tensor_parallel_size": 2}, refused=True),
        "colocate": Change(True),
        "sleep_level": Change(1, given=BESIDE),
        "max_model_len": Change(32),
        "dtype": Change("bfloat16"),
        "gpu_memory_utilization": Change(0.3),
        "kv_cache_gib": Change(0.5),
        "cpus_per_engine": Change(2),
        "device": Change("cuda", given=BESIDE),
        "engine_arguments": Change({"block_size": 32}),
        "environment": Change({"OMP_NUM_THREADS": "3"}),
        "start_timeout": Change(100.0),
        "generate_timeout": Change(100.0),
        "sync_timeout": Change(100.0),
        "transfer": Change("gloo", given={"device": "cuda", **BESIDE}),
        "bucket_bytes": Change(2**15),
        "lora": Change("adapter", refused=True),  # the policy has none
        "quantization": Change("fp8", given={"dtype": "bfloat16"}),
        "health": Change(HealthPolicy(max_restarts=1)),
    },
    HealthPolicy: {
        "probe_period": PROBES,
        "probe_timeout": PROBES,
        "probe_failures": PROBES,
        "step_timeout": Change(100.0),
        "max_restarts": Change(2),
        "request_attempts": Change(2),
        "recovery_timeout": Change(10.0),
        "report_after": Change(50.0),
    },
    VLLMServer: {
        name: Unseen("what a server is asked: tests/rollout/server")
        for name in (
            *("urls", "served_model", "token", "token_variable", "concurrency", "start_timeout", "request_timeout"),
            *("sync_timeout", "retries", "backoff", "transfer", "bucket_bytes", "ssl_ca_certs"),
        )
    },
    ReplayEngine: {"folder": Unseen("where all of its samples come from: tests/callbacks/test_dump.py")},
}
LEAST: dict[type, dict[str, Any]] = {VLLMPool: {"num_engines": 1}, HealthPolicy: {}}

_NUMBERS = itertools.count()


def fake_actor(**answers: Callable[..., Any]) -> Any:
    """An actor without a process: its methods answer at once."""
    import ray

    def remote(answer: Callable[..., Any]) -> Any:
        return SimpleNamespace(remote=lambda *args: ray.put(answer(*args)))

    usual: dict[str, Callable[..., Any]] = {
        "start": lambda has_weights: {"max_model_len": 64, "vocabulary": 128},
        "health": lambda: {"seconds_since_step": 0.0, "paused": False},
        "sleep": lambda level: None,
        "abort": lambda keys: None,
    }
    # Each time another process, as if the one before had ended.
    process = SimpleNamespace(remote=lambda: ray.put({"worker": str(next(_NUMBERS))}))
    methods = {name: remote(answer) for name, answer in (usual | answers).items()}
    return SimpleNamespace(**methods, identify=SimpleNamespace(options=lambda **options: process))


class FakeLauncher(ActorLauncher):
    """Engines that are up at once. Every second one scores 0.05 lower, and all note at which level they sleep."""

    used: "FakeLauncher"

    def __call__(self, number: int, name: str) -> Any:
        FakeLauncher.used = self
        self.slept: list[int] = []
        return fake_actor(score=lambda rows: [[-1.0 - 0.05 * (number % 2)]], sleep=self.slept.append)


def started(model: Path, kind: type, arguments: Mapping[str, Any], *rest: Any) -> Any:
    """All that a pool hands to its engines, their sender and those who wait for them; or its error."""
    engines = VLLMPool(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ActorLauncher", FakeLauncher)
        try:
            engines.configure_weights(ModuleWeights(torch.nn.Linear(2, 2)))
            engines.start(str(model), dtype=torch.float32, load_weights=True)
            settings, launcher = engines.engines.settings, FakeLauncher.used
            sender: Any = engines.sender
            stream = engines.stream(SamplingSpec(), iteration=0)
            stream.close()
            score = engines.scores([[1, 2]])
            engines.sleep()
            return {
                "vllm": (launcher.arguments, launcher.environment, launcher.in_process, settings.workers_per_engine),
                "limits": (settings.start_timeout, settings.sync_timeout, settings.policy),
                "waits": stream.scheduler.stall_detector.timeout,
                "places": [(*place_of(place), place.environment) for place in launcher.placements],
                "sender": [
                    (type(sender).__name__, *(getattr(sender, name, None) for name in ("bucket_bytes", "timeout")))
                ],
                "score": score,
                "slept": launcher.slept,
            }
        except (ValueError, TypeError, RuntimeError) as error:
            return {"error": str(error)}
        finally:
            engines.close()


def place_of(place: ActorPlacement) -> tuple[Any, ...]:
    """What is asked of Ray for an engine."""
    strategy = place.options["scheduling_strategy"]
    return place.options["num_cpus"], place.options["num_gpus"], type(strategy).__name__


def engines_of(policy: HealthPolicy, *, has_weights: bool, **answers: Callable[..., Any]) -> Engines:
    """One engine, up."""
    settings = PoolSettings(num_engines=1, sync_timeout=1.0, start_timeout=60.0, policy=policy, has_weights=has_weights)
    return Engines.start(settings, lambda number, name: fake_actor(**answers))


def watched(kind: type, arguments: Mapping[str, Any], *rest: Any) -> Any:
    """When an engine is declared dead, how often it is restarted, and how long requests wait for it."""
    policy = HealthPolicy(**arguments)
    return hangs(policy), lives(policy), attempts(policy), patience(policy)


def hangs(policy: HealthPolicy) -> bool:
    """Whether an engine is dead that has made no step for 200 seconds."""
    engines = engines_of(policy, has_weights=True, health=lambda: {"seconds_since_step": 200.0, "paused": False})
    try:
        return engines.probe_now(engines.handles)
    finally:
        engines.close()


def lives(policy: HealthPolicy) -> int:
    """Processes of an engine that always dies."""
    engines = engines_of(policy, has_weights=True)
    count = 0
    while not engines.all_dead:
        if engines.handles[0].state is State.DEAD:
            engines.wait(1.0)
        else:
            engines.mark_dead(engines.handles[0], "it dies")
            count += 1
    engines.close()
    return count


def attempts(policy: HealthPolicy) -> int:
    """Times that a request which kills engines is given out."""
    given: list[str] = []

    def die(key: str, requests: Any) -> None:
        given.append(key)
        engines.mark_dead(engines.handles[0], "it dies")

    engines = engines_of(dataclasses.replace(policy, max_restarts=100), has_weights=True, generate=die)
    scheduler = RequestScheduler(engines, timeout=1e9)
    try:
        scheduler.submit([([1], {})])
        with pytest.raises(EngineError, match="engines failed while they worked on the same 1 request"):
            scheduler.collect()
        return len(given)
    finally:
        scheduler.close()
        engines.close()


def patience(policy: HealthPolicy) -> tuple[str, int]:
    """What becomes of requests that no engine has served for 30 seconds, and the reports after 200 seconds."""
    now = 0.0
    engines = engines_of(policy, has_weights=False)
    scheduler = RequestScheduler(engines, timeout=1e9, clock=lambda: now)
    outcomes = []
    for now in (0.0, 30.0, 200.0):  # noqa: B007  (the clock's)
        try:
            scheduler.check()
            outcomes.append("waits")
        except EngineError as error:
            outcomes.append(type(error).__name__)
    scheduler.close()
    engines.close()
    return outcomes[1], scheduler.stall_detector.num_reports


@pytest.mark.ray
@pytest.mark.parametrize("kind", LEAST)
def test_no_argument_of_a_pool_is_accepted_and_ignored(tmp_path: Path, ray_session: None, kind: type) -> None:
    tiny_model(tmp_path / "model")
    observe = partial(started, tmp_path / "model") if kind is VLLMPool else watched
    first = seen_twice(kind, LEAST[kind], observe)
    check_none_is_ignored(kind, TABLE[kind], LEAST[kind], observe, first=first)
