"""Every argument of every engine but ``LocalEngine``, which is in ``test_rollouts.py``: changed, something is seen."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhfkit import Episodes, VLLMPool, VLLMServer
from rlhfkit.episodes import AgentEpisodes
from rlhfkit.rollout import HealthPolicy, ReplayEngine

from . import episodes, supervision
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
    ReplayEngine: {"folder": Change("@other_dump")},
    Episodes: {
        "environment": Change(episodes.Chatting),
        "tools": Change((episodes.double,), given={"environment": None}, refused=True),  # without either it is refused
        "tool_call_parser": Change("mistral", refused=True),  # of an environment without tools
        "max_turns": Change(1),
        "max_episode_tokens": Change(10),
        "episode_timeout": Change(1e-6, refused=True),
        "environment_timeout": Change(1e-6, refused=True),
        "concurrency": Change(1),
        "parallel_calls": Change(2),
        "on_error": Change("raise", given={"environment": episodes.Failing}, refused=True),
        "chat_template_kwargs": Change({"style": "!"}, given={"environment": episodes.Chatting}),
    },
    AgentEpisodes: {
        "agent": Change(episodes.asks_once),
        "max_turns": Change(1),
        "max_episode_tokens": Change(20),
        "episode_timeout": Change(1e-6, refused=True),
        "request_timeout": Change(1e-6, refused=True),
        "concurrency": Change(1),
        "parallel_calls": Change(2),
        "on_error": Change("raise", given={"agent": episodes.fails}, refused=True),
        "server.host": Change("127.0.0.2"),
        "server.port": Change(episodes.PORT),
        "server.token": Change(episodes.TOKEN),
        "server.public_url": Change(f"http://localhost:{episodes.PORT}", given={"server.port": episodes.PORT}),
        "server.ssl_certfile": Change(
            "@certificate.pem", given={"server.ssl_keyfile": "@key.pem"}, built=True, refused=True
        ),
        "server.ssl_keyfile": Change(
            "@key.pem", given={"server.ssl_certfile": "@certificate.pem"}, built=True, refused=True
        ),
        "tool_call_parser": Change(episodes.called, given={"agent": episodes.asks_once}),
        "chat_template_kwargs": Change({"style": "!"}),
    },
}
LEAST: dict[type, dict[str, Any]] = {
    VLLMPool: {"num_engines": 1},
    HealthPolicy: {},
    ReplayEngine: {"folder": "@dump"},
    Episodes: {"environment": episodes.Turns},
    AgentEpisodes: {"agent": episodes.asks},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("engines")
    episodes.prepare(place)
    return place


@pytest.mark.parametrize("kind", [ReplayEngine, Episodes, AgentEpisodes])
@pytest.mark.long
def test_no_argument_of_an_engine_that_plays_is_accepted_and_ignored(folder: Path, kind: type) -> None:
    check_in_full(kind, partial(episodes.played, folder))


@pytest.mark.ray
@pytest.mark.parametrize("kind", [VLLMPool, HealthPolicy])
def test_no_argument_of_a_pool_is_accepted_and_ignored(folder: Path, ray_session: None, kind: type) -> None:
    check_in_full(kind, partial(supervision.started, folder) if kind is VLLMPool else supervision.watched)


def check_in_full(kind: type, observe: Any) -> None:
    first = seen_twice(kind, LEAST[kind], observe)
    check_none_is_ignored(kind, TABLE[kind], LEAST[kind], observe, first=first)
