"""Joining or starting the Ray that engines live in."""

import contextlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from rlhfkit.rollout.remote.placement import RankLocation, visible_gpus


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


def join_or_start_ray(*, num_cpus: int, ranks: Sequence[RankLocation] = ()) -> bool:
    """Use the Ray that this process is connected to, else the cluster in ``RAY_ADDRESS``, else start one here.

    A Ray started here lives as long as this process, and has the GPUs that this process sees and no rank uses.

    Args:
        num_cpus: Cores that the engines will claim; a machine with fewer is overcommitted, not refused.
        ranks: Where the training ranks sit.

    Returns:
        Whether it was started here.
    """
    ray = require_ray()
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        return False
    free = gpus_without_ranks(ranks)
    with _visible(free):
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            num_gpus=None if free is None else len(free),
            include_dashboard=False,
            # Only token ids travel through it. Ray's default is 30 % of the machine's memory.
            object_store_memory=256 * 2**20,
            log_to_driver=False,
        )
    return True


def gpus_without_ranks(ranks: Sequence[RankLocation]) -> list[str] | None:
    """The GPUs that this process sees and no rank uses, by their ids; ``None``: no rank uses any, so all are free.

    Args:
        ranks: Where the training ranks sit.
    """
    if all(seat.gpu is None for seat in ranks):
        return None
    import torch

    host, free = socket.gethostname(), []
    for index, name in enumerate(visible_gpus()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        gpu = RankLocation(host, name, on_ray=False, uuid=None if uuid is None else str(uuid))
        if not any(gpu.is_gpu_of(seat) for seat in ranks):
            free.append(name)
    return free


@contextlib.contextmanager
def _visible(gpus: list[str] | None) -> Iterator[None]:
    """Let what is started inside see these GPUs alone; ``None``: all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus is None:
        yield
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
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
