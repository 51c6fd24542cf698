"""An engine of two processes on a Ray cluster of two machines with one core each, which are processes here."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster
from tiny_models import token_logprobs


def serve(folder: Path, model: str) -> dict[str, Any]:
    """Send weights twice, score each time, and kill a worker of the second machine; return what has happened."""
    import ray

    head = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        return use_engine(Path(model))
    finally:
        ray.shutdown()
        cluster.shutdown()


def use_engine(folder: Path) -> dict[str, Any]:
    """What an engine reports that spans the machines."""
    from rlhfkit.models import load_causal_lm
    from rlhfkit.rollout.supervision.health import HealthPolicy
    from rlhfkit.rollout.vllm.pool import VLLMPool
    from rlhfkit.rollout.weight_sync.source import ModuleWeights

    pool = VLLMPool(
        tensor_parallel_size=2,
        device="cpu",
        kv_cache_gib=1 / 16,
        max_model_len=128,
        start_timeout=600,
        generate_timeout=100,
        sync_timeout=60,
        health=HealthPolicy(probe_period=1.0, probe_timeout=60),
        bucket_bytes=2**15,
    )
    pool.start(str(folder), dtype=torch.float32)
    report: dict[str, Any] = {}
    try:
        assert pool.engines is not None
        (handle,) = pool.engines.handles
        report["machines"] = handle.info["machines"]
        model = load_causal_lm(str(folder)).eval()
        tokens = [5, 17, 3, 40, 22, 9, 31, 8, 50, 12]
        report["differences"] = []
        for version in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                pool.load(ModuleWeights(model), version)
                difference = token_logprobs(model, tokens) - torch.tensor(pool.score([tokens])[0])
            report["differences"].append(float(difference.abs().max()))
        report |= lose_a_worker(handle)
    finally:
        pool.close()
    return report


def lose_a_worker(handle: Any) -> dict[str, Any]:
    """What the engine's health says after a worker of its second machine was killed, and how long that took."""
    import psutil
    import ray

    (other,) = ray.get(handle.actor.__ray_call__.remote(lambda self: self._machines._actors), timeout=60)
    second = ray.get(other.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    workers = [
        child for child in psutil.Process(second).children() if "resource_tracker" not in " ".join(child.cmdline())
    ]
    workers[0].kill()
    start = time.monotonic()
    while time.monotonic() < start + 60:
        try:
            ray.get(handle.actor.health.remote(), timeout=60)
        except ray.exceptions.RayError as error:
            return {"lost": str(error), "seconds": time.monotonic() - start}
        time.sleep(0.2)
    return {"lost": ""}
