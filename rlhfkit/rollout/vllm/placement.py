"""Where engines run: on devices of their own, or on the GPUs of the training ranks.

Engines with devices of their own form one Ray placement group, with a bundle for each engine on each of its machines:
one, unless the engine is larger than the largest. A colocated engine is on one machine, pinned to the GPUs of as many
neighbouring ranks as it has GPUs.
"""

import contextlib
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.gpus import VARIABLE, ask_driver, name_of_uuid, uuid_of_name, visible_names, why_cuda_is_missing
from rlhfkit.ray_placement import ReservedResources, actor_options, fewest_machines, hold_bundles, release_bundles
from rlhfkit.ray_session import join_or_start_ray
from rlhfkit.rollout.errors import EngineError


@dataclass(frozen=True)
class RankLocation:
    """Where a training rank runs."""

    host: str
    """Name of its machine."""
    gpu: str | None
    """Its GPU, by the id that ``CUDA_VISIBLE_DEVICES`` takes; ``None`` on a CPU."""
    on_ray: bool
    """Whether Ray has assigned the GPU to the rank, as it has for ranks that are Ray actors."""
    uuid: str | None = None
    """UUID of the GPU or MIG instance; ``None`` if the driver reports none."""
    kind: str = ""
    """What the driver calls it, such as ``NVIDIA H100 80GB HBM3``; empty: unknown."""
    memory: int = 0
    """Its bytes; 0: unknown."""

    def __str__(self) -> str:
        return f"GPU {self.gpu} of {self.host}"

    def has_same_gpu(self, other: "RankLocation") -> bool:
        """Whether both have the same GPU: by UUID if both are known, else by machine and id.

        In containers and under Slurm, processes may number the GPUs of one machine differently.
        """
        if self.gpu is None or other.gpu is None:
            return False
        mine, others = self.uuid or uuid_of_name(self.gpu), other.uuid or uuid_of_name(other.gpu)
        if mine and others:
            return mine == others
        return (self.host, self.gpu) == (other.host, other.gpu)


@dataclass(frozen=True)
class ActorPlacement:
    """Where one engine runs."""

    options: dict[str, Any]
    """Options of the Ray actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set in the engine's process before anything else."""
    excluded: tuple[RankLocation, ...] = ()
    """Training ranks whose GPUs the engine must not have."""
    shared: tuple[RankLocation, ...] = ()
    """Training ranks whose GPUs the engine must have, and no others."""
    others: tuple[dict[str, Any], ...] = ()
    """Options of the Ray actors of its other machines."""


# ---------------------------------------------------------------- ranks and their GPUs


def locate_rank(*, colocate: bool = False) -> RankLocation:
    """Return the location of this rank.

    Its GPU counts once the process has initialized CUDA, as a Trainer has before it sends weights; if ``colocate``,
    always.
    """
    import torch

    cuda: Any = torch.cuda  # has no types
    if not (cuda.is_available() and (colocate or cuda.is_initialized())):
        return RankLocation(socket.gethostname(), None, on_ray=False)
    index = cuda.current_device()
    gpu, kind = visible_gpus()[index], str(cuda.get_device_properties(index).name)
    return RankLocation(socket.gethostname(), gpu, on_ray=gpu in _gpus_from_ray(), uuid=_uuid(index), kind=kind)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, as in ``CUDA_VISIBLE_DEVICES``, in CUDA's order."""
    import torch

    count, value = torch.cuda.device_count(), os.environ.get(VARIABLE)
    # The number of GPUs of the machine is not known here, but how many CUDA shows.
    return visible_names(value, count if value is None else sys.maxsize)[:count]


def check_locations(ranks: Sequence[RankLocation]) -> None:
    """Raise EngineError if ranks share a GPU, or nobody can tell which GPUs they have."""
    first: dict[Any, int] = {}
    for number, rank in enumerate(ranks):
        if rank.gpu is None:
            continue
        uuid = rank.uuid or uuid_of_name(rank.gpu)
        other = first.setdefault(uuid or (rank.host, rank.gpu), number)
        if other == number:
            continue
        if uuid:
            raise EngineError(f"ranks {other} and {number} are both on {rank}: give every rank a GPU of its own")
        raise EngineError(
            f"ranks {other} and {number} both call their GPU {rank.gpu!r} on {rank.host}, and the driver reports no "
            "UUIDs, so it is unknown which GPUs engines may have: have every rank see all of its machine's GPUs (srun "
            "--gpu-bind=none), or number them machine-wide in CUDA_VISIBLE_DEVICES"
        )


def assigned_gpus() -> list[RankLocation]:
    """Return the GPUs that Ray has assigned to this worker, with what the driver reports of them."""
    import ray

    names = [str(name) for name in ray.get_gpu_ids()]
    known = ask_driver({**os.environ, VARIABLE: ",".join(names)}).gpus if names else ()
    host = socket.gethostname()
    if len(known) != len(names):  # no driver, or not NVIDIA's
        return [RankLocation(host, name, on_ray=True) for name in names]
    return [
        RankLocation(host, name, on_ray=True, uuid=gpu.uuid, kind=gpu.name, memory=gpu.memory)
        for name, gpu in zip(names, known, strict=True)
    ]


def _uuid(index: int) -> str | None:
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # absent from builds without CUDA
    return None if uuid is None else str(uuid)


def _gpus_from_ray() -> list[str]:
    """Return the GPUs that Ray has assigned to this process; none if it is not a Ray actor."""
    if "ray" not in sys.modules:
        return []
    import ray

    is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id()
    return [str(name) for name in ray.get_gpu_ids()] if is_actor else []


# ---------------------------------------------------------------- Ray


def start_ray_for_engines(*, num_cpus: int, ranks: Sequence[RankLocation] = ()) -> bool:
    """Join or start Ray; returns whether it was started here.

    A Ray started here has the visible GPUs that no rank uses, and at least ``num_cpus`` cores, even if there are fewer.
    """
    import ray

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return join_or_start_ray()
    free = gpus_without_ranks(ranks)
    with _only_visible(free):
        return join_or_start_ray(
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            num_gpus=None if free is None else len(free),
            # Only token ids pass through it. Ray's default is 30 % of the machine's memory.
            object_store_memory=256 * 2**20,
        )


def gpus_without_ranks(ranks: Sequence[RankLocation]) -> list[str] | None:
    """Return the ids of the GPUs that this process sees and no rank uses; ``None`` if ranks use no GPUs."""
    if all(rank.gpu is None for rank in ranks):
        return None
    host, free = socket.gethostname(), []
    for index, name in enumerate(visible_gpus()):
        gpu = RankLocation(host, name, on_ray=False, uuid=_uuid(index))
        if not any(gpu.has_same_gpu(rank) for rank in ranks):
            free.append(name)
    return free


def why_ray_has_few_gpus(ranks: Sequence[RankLocation]) -> str:
    """Say which GPUs a Ray that was started here has, or why this machine's cannot be used; empty: nothing is known."""
    import torch

    if all(rank.gpu is None for rank in ranks):
        reason = why_cuda_is_missing(torch.version.cuda, torch.cuda.is_available(), os.environ.get(VARIABLE))
        return "" if reason is None else f". {reason}"
    seen, value = visible_gpus(), os.environ.get(VARIABLE)
    return (
        f". Rank 0 has started Ray with the GPUs that it sees and no rank uses: it sees {len(seen)} "
        f"({'all' if value is None else f'CUDA_VISIBLE_DEVICES={value}'}). If the machine has more, have rank 0 see "
        "them (srun --gpu-bind=none), or start Ray before the run (ray start --head) and set RAY_ADDRESS"
    )


@contextlib.contextmanager
def _only_visible(gpus: list[str] | None) -> Iterator[None]:
    """Let processes started inside the context see these GPUs only; ``None``: all."""
    before = os.environ.get(VARIABLE)
    if gpus is None:
        yield
        return
    os.environ[VARIABLE] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


# ---------------------------------------------------------------- colocated engines


def assign_ranks(ranks: Sequence[RankLocation], num_engines: int, processes: int) -> list[list[RankLocation]]:
    """Return the ranks whose devices each colocated engine shares: engine i has ranks i * P to (i + 1) * P - 1.

    P is ``processes``, the devices of an engine. Raises EngineError if there are fewer ranks than devices needed, or
    those of one engine are on several machines.
    """
    wanted = num_engines * processes
    if wanted > len(ranks) and any(rank.gpu is not None for rank in ranks):
        raise EngineError(
            f"VLLMPool(colocate=True) puts {num_engines} engine(s) of {processes} GPU(s) on the GPUs of the training "
            f"ranks, of which there are {len(ranks)}: lower num_engines or tensor_parallel_size, or train on more "
            "devices"
        )
    shares = []
    for engine in range(num_engines):
        first = engine * processes
        # Without GPUs several engines may share the machine of one rank.
        own = [ranks[(first + index) % len(ranks)] for index in range(processes)]
        hosts = {rank.host for rank in own}
        if len(hosts) > 1:
            raise EngineError(
                f"engine {engine} would share the GPUs of ranks that are on {len(hosts)} machines; an engine lives on "
                f"one: choose sizes (tensor_parallel_size, ...) whose product divides the ranks of a machine, not "
                f"{processes}"
            )
        shares.append(own)
    return shares


def colocated_placements(ranks: Sequence[RankLocation], num_engines: int, processes: int) -> list[ActorPlacement]:
    """Return the placements of colocated engines; EngineError also if a rank's machine is not in Ray's cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    placements = []
    for own in assign_ranks(ranks, num_engines, processes):
        options: dict[str, Any] = {
            # Cores are shared as well. GPUs are named in the environment: the rank has them.
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(_node_of(own[0].host), soft=False),
        }
        if own[0].gpu is None:
            placements.append(ActorPlacement(options))
            continue
        environment = {VARIABLE: ",".join(map(_name_in_other_processes, own))}
        placements.append(ActorPlacement(options, environment, shared=tuple(own)))
    return placements


def _name_in_other_processes(rank: RankLocation) -> str:
    """Return the rank's GPU as ``CUDA_VISIBLE_DEVICES`` of a process that Ray starts.

    The number of a GPU may be another one there: Slurm and containers give processes numbers of their own.
    """
    assert rank.gpu is not None
    return rank.gpu if rank.uuid is None or not rank.gpu.isdecimal() else name_of_uuid(rank.uuid, rank.kind)


def _node_of(host: str) -> str:
    """Return Ray's id of a machine; EngineError if it is not in Ray's cluster."""
    import ray

    names = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if host not in names:
        raise EngineError(
            f"VLLMPool(colocate=True) starts engines where the training ranks are, but {host} is not in Ray's cluster, "
            f"which has {sorted(names)}: start Ray there, or use launcher='ray'"
        )
    return str(names[host])


# ---------------------------------------------------------------- engines with devices of their own


class DedicatedPlacement:
    """Devices of their own for engines: a placement group with one bundle per engine, of ``cpus`` and ``gpus``.

    A bundle is never divided, so its GPUs are on one machine. An engine of several ``processes`` that no machine has
    room for gets a bundle on each of as few machines as have it; with ``processes=1`` that is an error. ``SPREAD``
    prefers different machines for different bundles. A restarted engine gets its bundles again; if a machine is gone,
    Ray moves its bundles. No engine is started on a GPU of ``ranks`` (all training ranks). EngineError if the cluster
    or its largest machine is too small, or busy for ``timeout`` seconds; ``note`` is added to the first of these.
    """

    def __init__(
        self,
        num_engines: int,
        cpus: int,
        gpus: int,
        timeout: float,
        *,
        ranks: Sequence[RankLocation] = (),
        processes: int = 1,
        note: str = "",
    ) -> None:
        import ray

        self._ranks = tuple(rank for rank in ranks if rank.gpu is not None)
        bundle: dict[str, float] = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        total = ray.cluster_resources()
        of_ranks = [rank for rank in self._ranks if rank.on_ray]
        taken = {"GPU": len(of_ranks)}
        for name, each in sorted(bundle.items(), reverse=True):  # GPUs first: they are the scarce resource
            left = total.get(name, 0) - taken.get(name, 0)
            if left < each * num_engines:
                used = f", {taken[name]} of which the training ranks use" if taken.get(name) else ""
                cure = "lower VLLMPool(num_engines=..., tensor_parallel_size=...) or add machines"
                if name == "GPU" and self._ranks:
                    cure += ", train on fewer GPUs, or share them: VLLMPool(colocate=True)"
                raise EngineError(
                    f"{num_engines} engine(s) need {each * num_engines:g} {name}(s), but Ray's cluster has "
                    f"{total.get(name, 0):g}{used}: {cure}{note}"
                )
        nodes = _resources_for_engines(of_ranks)
        machines = fewest_machines(processes, bundle, nodes)
        if machines is None:
            raise EngineError(_too_large(bundle, nodes, processes))
        self._machines = machines
        part = {name: float(math.ceil(each / machines)) for name, each in bundle.items()}  # Ray takes no 1.5
        self._group = hold_bundles(
            part,
            num_engines * machines,
            strategy="SPREAD",
            timeout=timeout,
            what="engine(s)" if machines == 1 else "part(s) of engines",
            cure="End what else uses the cluster, or add machines",
            error_type=EngineError,
        )
        self._resources = ReservedResources(part, self._group.id.hex(), range(self._group.bundle_count))

    def placements(self) -> list[ActorPlacement]:
        return held_placements(self._resources, self._ranks, self._machines)

    def close(self) -> None:
        release_bundles(self._group)


def held_placements(
    resources: ReservedResources, ranks: Sequence[RankLocation], machines: int = 1
) -> list[ActorPlacement]:
    """Return the placements of engines whose devices are held, each in as many bundles as it has ``machines``."""
    excluded = tuple(rank for rank in ranks if rank.gpu is not None)
    options = [actor_options(resources, number) for number in range(len(resources.bundles))]
    return [
        ActorPlacement(options[first], excluded=excluded, others=tuple(options[first + 1 : first + machines]))
        for first in range(0, len(options), machines)
    ]


def _resources_for_engines(of_ranks: Sequence[RankLocation]) -> list[dict[str, float]]:
    """Return the resources of each machine, without the GPUs of training ranks."""
    import ray

    taken = Counter(rank.host for rank in of_ranks)
    return [
        node["Resources"] | {"GPU": node["Resources"].get("GPU", 0) - taken[node["NodeManagerHostname"]]}
        for node in ray.nodes()
        if node["Alive"]
    ]


def _too_large(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]], processes: int) -> str:
    largest = {name: max(node.get(name, 0) for node in nodes) for name in need}
    short = [name for name in sorted(need, reverse=True) if largest[name] < need[name]]
    if not short:
        return f"an engine needs {dict(need)} of one machine, and no machine of Ray's cluster has all of it"
    name = short[0]
    many = "" if processes == 1 else f", and its {processes} processes cannot be divided equally over those there are"
    return (
        f"an engine is on one machine and needs {need[name]:g} {name}(s) there, but the largest machine of Ray's "
        f"cluster has {largest[name]:g}{many}: lower the product of VLLMPool(tensor_parallel_size=..., "
        "pipeline_parallel_size=..., data_parallel_size=...)"
    )
