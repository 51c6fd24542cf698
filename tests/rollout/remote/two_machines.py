"""A Ray cluster of two machines with one core each, which are processes here, and ranks that use it."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_worker
import torch
from ray.cluster_utils import Cluster
from tiny_models import token_logprobs
from waiting import until

HEAD = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False}


@contextlib.contextmanager
def two_machines() -> Iterator[Cluster]:
    """This rank's ``RAY_ADDRESS`` is theirs."""
    import ray

    ray_worker.use()
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    cluster.add_node(num_cpus=1, include_log_monitor=False)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def place_engines(folder: Path) -> None:
    """Entry point of a rank: engines apart spread over the machines, and what has no room is refused."""
    import ray

    from rlhfkit.ray_session import cluster_address
    from rlhfkit.rollout.errors import EngineError
    from rlhfkit.rollout.vllm.placement import DedicatedPlacement, start_ray_for_engines

    def machines(placement: DedicatedPlacement) -> int:
        return len(set(ray.util.placement_group_table(placement._group)["bundles_to_node_id"].values()))

    with two_machines() as cluster:
        start_ray_for_engines(num_cpus=1)
        cluster.wait_for_nodes()
        assert cluster_address() != "127.0.0.1"  # engines of another machine must reach the trainer
        dedicated = DedicatedPlacement(2, cpus=1, gpus=0, timeout=60)
        assert machines(dedicated) == 2
        until(lambda: not ray.available_resources().get("CPU"))  # which machines tell a moment later
        for (engines, cpus, gpus, processes), words in {
            (3, 1, 0, 1): "3 engine(s) need 3 CPU(s), but Ray's cluster has 2",
            (1, 1, 1, 1): "1 engine(s) need 1 GPU(s), but Ray's cluster has 0",
            (1, 2, 0, 1): "is on one machine and needs 2 CPU(s) there, but the largest machine of Ray's cluster",
            (1, 2, 0, 3): "has 1, and its 3 processes cannot be divided equally over those there are",
            (2, 1, 0, 1): "could not place 2 engine(s) of 1 CPU (SPREAD) within 1 s: 2 CPU are needed and 0 of 2 are",
        }.items():
            start = time.monotonic()
            with pytest.raises(EngineError, match=re.escape(words)):
                DedicatedPlacement(engines, cpus=cpus, gpus=gpus, timeout=1, processes=processes)
            assert time.monotonic() - start < 60
        dedicated.close()
        divided = DedicatedPlacement(1, cpus=2, gpus=0, timeout=60, processes=2)  # two bundles, for one engine
        assert (machines(divided), len(divided.placements()[0].others)) == (2, 1)
        divided.close()
        DedicatedPlacement(2, cpus=1, gpus=0, timeout=60).close()  # what was given back can be had again


def use_an_engine(folder: Path, model: str) -> None:
    """Entry point of a rank: an engine over both machines has the weights of every sync, until a worker is killed."""
    from rlhfkit.models import load_causal_lm
    from rlhfkit.rollout.supervision.health import HealthPolicy
    from rlhfkit.rollout.vllm.pool import VLLMPool
    from rlhfkit.rollout.weight_sync.source import ModuleWeights

    pool = VLLMPool(
        tensor_parallel_size=2,
        device="cpu",
        kv_cache_gib=1 / 16,
        max_model_len=128,
        sync_timeout=60,
        health=HealthPolicy(probe_period=1.0, probe_timeout=60),
        bucket_bytes=2**15,
    )
    with two_machines(), contextlib.closing(pool):
        pool.start(model, dtype=torch.float32)
        assert pool.engines is not None
        (engine,) = pool.engines.handles
        assert engine.info["machines"] == 2
        policy, tokens = load_causal_lm(model).eval(), [5, 17, 3, 40, 22, 9, 31, 8, 50, 12]
        for version in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                pool.load(ModuleWeights(policy), version)
                found = torch.tensor(pool.score([tokens])[0])
                # float32 on both sides; what is left is the order of summation
                torch.testing.assert_close(found, token_logprobs(policy, tokens), rtol=0, atol=1e-5)
        lose_a_worker(engine)


def lose_a_worker(engine: Any) -> None:
    """An engine says that it is lost once a worker of its second machine was killed."""
    import ray

    (other,) = ray.get(engine.actor.__ray_call__.remote(lambda self: self._machines._actors), timeout=60)
    second = psutil.Process(ray.get(other.__ray_call__.remote(lambda self: os.getpid()), timeout=60))
    next(child for child in second.children() if "resource_tracker" not in " ".join(child.cmdline())).kill()

    def error() -> str:
        try:
            ray.get(engine.actor.health.remote(), timeout=60)
        except ray.exceptions.RayError as raised:
            return str(raised)
        return ""

    assert "machine 1 of the engine is lost: a worker has ended" in until(error, limit=60)
