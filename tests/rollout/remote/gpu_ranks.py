"""Training ranks on a machine that pretends to have four GPUs, and where engines would go beside them."""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

GPUS = 4


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


@contextlib.contextmanager
def located_ranks() -> Iterator[list[Any]]:
    """Where all ranks are, on rank 0, and nothing on the others, which wait until it has finished."""
    from rlhfkit.distributed import gather_objects, get_rank
    from rlhfkit.rollout.vllm.placement import locate_rank

    dist.init_process_group("gloo")
    locations = gather_objects(locate_rank())
    yield locations if get_rank() == 0 else []
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def outside_ray(gpus: tuple[str, str] | None = None, uuids: Any = (None, None), address: str = "") -> Iterator[Any]:
    """:func:`located_ranks` of ranks that Ray has not started; rank 0 joins the cluster, or starts Ray without address.

    ``gpus``: the one GPU that each rank sees, as Slurm may have it; ``None``: all of them.
    """
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["RANK"] = str(rank)
    os.environ["RAY_AUTH_MODE"] = "disabled"  # as the cluster has it: its token is not known here
    os.environ.pop("RAY_ADDRESS", None)
    os.environ |= {"RAY_ADDRESS": address} if address else {}
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}
    pretend_gpus(uuids[rank])
    if not address:
        import ray_worker

        ray_worker.use()
    with located_ranks() as locations:
        yield locations
        if locations:
            import ray

            ray.shutdown()


class Placed:
    """What a pool does on rank 0 before it starts two engines, and the GPUs that they would have."""

    def __init__(self, locations: list[Any]) -> None:
        import ray

        from rlhfkit.rollout.vllm.pool import VLLMPool

        self.locations, self.pool = locations, VLLMPool(num_engines=2)
        self.device = self.pool.connect_to_ray(locations)
        self.places = self.pool.placements(self.device, locations)
        assigned = ray.remote(lambda: [str(name) for name in ray.get_gpu_ids()])
        tasks = [assigned.options(**place.options, max_retries=0).remote() for place in self.places]
        self.gpus = [name for names in ray.get(tasks, timeout=100) for name in names]

    def check_apart(self) -> None:
        """Engines have GPUs, each its own, and none of a rank's; one more than there are is refused at once."""
        from rlhfkit.rollout.errors import EngineError

        of_ranks = {rank.gpu for rank in self.places[0].excluded}
        assert len(of_ranks) == len(self.locations) == 2
        assert self.device == "cuda"
        assert len(set(self.gpus)) == len(self.gpus) == 2
        assert not set(self.gpus) & of_ranks
        self.pool.connect_to_ray(self.locations)  # engines that could not be started do not keep their devices
        self.pool.num_engines = 3
        words = (
            r"3 engine\(s\) need 3 GPU\(s\), but Ray's cluster has (2|4, 2 of which the training ranks use): "
            r".*share them: VLLMPool\(colocate=True\)"
        )
        with pytest.raises(EngineError, match=words):
            self.pool.placements(self.device, self.locations)


def refusal(place: Any) -> str:
    """What an engine says that is placed there; empty if it starts."""
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


def of_a_script(folder: Path) -> None:
    """Entry point of a rank of a script that starts Ray itself."""
    with outside_ray() as locations:
        if locations:
            found = Placed(locations)
            assert {rank.gpu for rank in locations} == {"0", "1"}
            assert set(found.gpus) == {"2", "3"}
            taken = dataclasses.replace(locations[1], gpu=found.gpus[0])
            said = refusal(dataclasses.replace(found.places[0], excluded=(taken,)))
            assert re.match(rf"RuntimeError: Ray gave this engine GPU {found.gpus[0]} of .*, which", said)
            found.check_apart()


def that_see_their_own(folder: Path) -> None:
    """Entry point of a rank that sees one GPU, so that a Ray that it starts has no other."""
    from rlhfkit.rollout.errors import EngineError

    words = (
        r"2 engine\(s\) need 2 GPU\(s\), but Ray's cluster has 0: .*train on fewer.* Rank 0 has started Ray .*: it "
        r"sees 1 \(CUDA_VISIBLE_DEVICES=0\)\. .*ray start --head"
    )
    with outside_ray(gpus=("0", "1")) as locations:
        if locations:
            with pytest.raises(EngineError, match=words):
                Placed(locations)


def of_slurm(folder: Path, address: str) -> None:
    """Entry point of a rank that sees its own GPU, on a cluster that counts all four.

    Rank 0 knows its GPU by UUID. Rank 1 has it as number 0 of a container, with a driver that tells UUIDs.
    """
    from simulated_driver import simulated_uuid

    from rlhfkit.gpus import ask_driver
    from rlhfkit.rollout.vllm.placement import colocated_placements

    first, second = (simulated_uuid(number) for number in range(2))
    with outside_ray((f"GPU-{first}", "0"), (None, second), address) as locations:
        if locations:
            import ray  # which reads RAY_AUTH_MODE then: with a token, the cluster's calls to this process are refused

            assert [rank.gpu for rank in locations] == [f"GPU-{first}", "0"]
            found = Placed(locations)
            said = {gpu: refusal(place) for gpu, place in zip(found.gpus, found.places, strict=True)}
            refused = {gpu for gpu, text in said.items() if "which training rank" in text}
            assert refused == {"0", "1"} & set(said)  # as Ray calls them
            assert all("let Ray start the ranks (launcher='ray')" in said[gpu] for gpu in refused)
            (place,) = colocated_placements(locations[1:], 1, 1)
            options = place.options | {"runtime_env": {"env_vars": place.environment}}
            (seen,) = ray.get(ray.remote(lambda: ask_driver().gpus).options(**options).remote(), timeout=100)
            assert seen.name == "Simulated 1"  # which rank 1 calls its number 0
            assert re.match(
                rf"RuntimeError: this engine shares GPU 0 of .* \(UUIDs \['{second}'\]\), but with "
                rf"CUDA_VISIBLE_DEVICES=0 it sees \['{first}'\]",
                refusal(dataclasses.replace(place, environment={"CUDA_VISIBLE_DEVICES": "0"})),
            )
            found.pool.close()


def of_ray() -> None:
    """A rank that Ray has started."""
    pretend_gpus()
    with located_ranks() as locations:
        if locations:
            Placed(locations).check_apart()


def start_a_cluster() -> None:
    """A Ray node that declares four GPUs, for others until stdin ends, and then for two ranks of its own."""
    import ray

    from rlhfkit.strategies.ray.launcher import RayLauncher

    ray.init(
        address="local", num_cpus=16, num_gpus=GPUS, include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False,
    )  # fmt: skip
    ray._private.worker._global_node.kill_log_monitor()  # nobody wants the logs
    print(f"address {ray.get_runtime_context().gcs_address}", flush=True)
    sys.stdin.read()
    RayLauncher(
        num_ranks=2, num_nodes=1, resources_per_rank={"CPU": 1.0, "GPU": 1.0}, device="cuda", timeout=100,
        return_weights=False,
    ).launch(of_ray)  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    start_a_cluster()
