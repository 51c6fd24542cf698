"""Joining or starting the Ray that engines live in."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any


def require_ray() -> Any:
    """The ``ray`` module, if it and vLLM are installed.

    Raises:
        ImportError: Naming what is missing and how to install it.
    """
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"VLLMPool needs {' and '.join(missing)}, not installed here: pip install 'rlhfkit[rollout]' on a machine "
            "with GPUs, 'rlhfkit[cpu]' on one without; or use LocalEngine(), which needs neither"
        )
    import ray

    return ray


def join_or_start_ray(*, num_cpus: int, num_gpus: int) -> None:
    """Use the Ray that this process is connected to, else the cluster in ``RAY_ADDRESS``, else start one here.

    A Ray started here lives as long as this process.

    Args:
        num_cpus: Cores that the engines will claim; a machine with fewer is overcommitted, not refused.
        num_gpus: GPUs that they will claim. They get the last ones of this machine, as training takes the first; 0:
            Ray sees all there are.
    """
    ray = require_ray()
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        return
    with _last_gpus_visible(num_gpus):
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            # Only token ids travel through it. Ray's default is 30 % of the machine's memory.
            object_store_memory=256 * 2**20,
            log_to_driver=False,
        )


@contextlib.contextmanager
def _last_gpus_visible(count: int) -> Iterator[None]:
    """Let Ray see only the last GPUs, so that it cannot give engines those the training ranks use."""
    import torch

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else [str(index) for index in range(torch.cuda.device_count())]
    if not count or count > len(visible):
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[-count:])
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def cluster_address() -> str:
    """Where others reach this process: loopback when all of the cluster is this machine."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
    return "127.0.0.1" if nodes == {here} else str(ray.util.get_node_ip_address())
