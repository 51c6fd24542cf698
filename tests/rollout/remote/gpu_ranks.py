"""Training ranks on a machine that pretends to have four GPUs, and where engines would go beside them."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

GPUS = 4
ENGINES = 2


def pretend_gpus(uuid: str | None = None) -> None:
    """Have torch see the GPUs that ``CUDA_VISIBLE_DEVICES`` names, else all; this rank uses that of its number.

    The driver reports no UUIDs but this one.
    """
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",") if name]
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count = lambda: len(named)
    cuda.current_device = lambda: int(os.environ["LOCAL_RANK"]) % len(named)
    cuda.get_device_properties = lambda index: SimpleNamespace(name="pretended", uuid=uuid)


def place_engines() -> dict[str, Any]:
    """What a pool does before it starts engines: this rank's GPU, and on rank 0 those of the engines."""
    from rlhfkit.distributed import gather_objects, get_rank
    from rlhfkit.rollout.errors import EngineError
    from rlhfkit.rollout.vllm.placement import locate_rank
    from rlhfkit.rollout.vllm.pool import VLLMPool

    locations = gather_objects(locate_rank())
    report: dict[str, Any] = {"gpu": locations[get_rank()].gpu}
    if get_rank() > 0:
        return report
    import ray

    def assigned() -> list[str]:
        return [str(name) for name in ray.get_gpu_ids()]

    pool = VLLMPool(num_engines=ENGINES)
    try:
        report["device"] = pool.connect_to_ray(locations)
        placements = pool.placements(report["device"], locations)
        tasks = [ray.remote(assigned).options(**place.options, max_retries=0).remote() for place in placements]
        report["engines"] = [name for names in ray.get(tasks, timeout=100) for name in names]
        report["excluded"] = [rank.gpu for rank in placements[0].excluded]
        if "RAY_ADDRESS" not in os.environ and not locations[0].on_ray:
            taken = dataclasses.replace(locations[1], gpu=report["engines"][0])
            report["refusal"] = refusal(dataclasses.replace(placements[0], excluded=(taken,)))
        if "RAY_ADDRESS" in os.environ and not locations[0].on_ray:
            report["starts"] = {gpu: refusal(place) for gpu, place in zip(report["engines"], placements, strict=True)}
        if locations[1].uuid is not None:
            report["beside"] = beside(locations[1])
        pool.connect_to_ray(locations)  # engines that could not be started do not keep their devices
        pool.num_engines = ENGINES + 1
        pool.placements(report["device"], locations)
    except EngineError as error:
        report["error"] = str(error)
    finally:
        pool.close()
    return report


def refusal(place: Any) -> str:
    """What an engine says that is placed there."""
    import ray

    from rlhfkit.rollout.vllm.actor import VLLMActor

    kind = ray.remote(VLLMActor).options(**place.options)
    engine = kind.remote({}, True, place)
    try:
        ray.get(engine.start.remote(True), timeout=100)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    finally:
        ray.kill(engine)
    return ""


def beside(rank: Any) -> dict[str, Any]:
    """Which GPU an engine sees that shares this rank's, and what it says if it were named by the rank's number."""
    import ray

    from rlhfkit.gpus import ask_driver
    from rlhfkit.rollout.vllm.placement import colocated_placements

    (place,) = colocated_placements([rank], 1, 1)
    options = place.options | {"runtime_env": {"env_vars": place.environment}}
    (seen,) = ray.get(ray.remote(lambda: ask_driver().gpus).options(**options).remote(), timeout=100)
    by_number = dataclasses.replace(place, environment={"CUDA_VISIBLE_DEVICES": rank.gpu})
    return {"seen": seen.name, "by_number": refusal(by_number)}


def place(folder: Path, address: str | None = None, own_gpu: str | None = None) -> dict[str, Any]:
    """A rank that Ray has not started; rank 0 joins the cluster, or starts Ray where there is no address.

    Args:
        folder: Not used.
        address: Of the cluster.
        own_gpu: Each rank sees its own GPU and no other, as Slurm may have it: by its ``number``; or (``uuid``) rank 0
            by UUID, and rank 1 as number 0 of a container, with a driver that tells UUIDs. ``None``: all.
    """
    import torch.distributed as dist

    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    os.environ["RAY_AUTH_MODE"] = "disabled"  # as the cluster has it: its token is not known here
    os.environ.pop("RAY_ADDRESS", None)
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    uuid = None
    if own_gpu is not None:
        from simulated_driver import simulated_uuid

        rank = int(os.environ["RANK"])
        names = [f"GPU-{simulated_uuid(0)}", "0"] if own_gpu == "uuid" else ["0", "1"]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank]
        uuid = simulated_uuid(1) if (own_gpu, rank) == ("uuid", 1) else None
    pretend_gpus(uuid)
    dist.init_process_group("gloo")
    try:
        report = place_engines()
        dist.barrier()
    finally:
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            import ray

            ray.shutdown()
    return report


def place_on_ray() -> str:
    """A rank that Ray has started."""
    import torch.distributed as dist

    pretend_gpus()
    dist.init_process_group("gloo")
    report = place_engines()
    dist.barrier()
    dist.destroy_process_group()
    return json.dumps(report)


def start_a_cluster() -> None:
    """A Ray node that declares four GPUs; ranks of its own first, then it waits for others until stdin ends."""
    import ray

    from rlhfkit.strategies.ray.launcher import RayLauncher

    ray.init(
        address="local", num_cpus=16, num_gpus=GPUS, include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False,
    )  # fmt: skip
    ray._private.worker._global_node.kill_log_monitor()  # nobody wants the logs
    print(json.dumps({"address": ray.get_runtime_context().gcs_address}), flush=True)
    for line in sys.stdin:
        launcher = RayLauncher(
            num_ranks=int(line), num_nodes=1, resources_per_rank={"CPU": 1.0, "GPU": 1.0}, device="cuda", timeout=100,
            return_weights=False,
        )  # fmt: skip
        print(launcher.launch(place_on_ray), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    start_a_cluster()
