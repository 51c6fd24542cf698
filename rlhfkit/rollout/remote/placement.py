"""Where engines run: apart from the training ranks, or on the GPUs of these.

An engine lives on one machine. With GPUs of their own all engines form one Ray placement group of one bundle each,
spread over the machines that have room. Colocated, each is pinned to the devices of as many neighbouring ranks as it
has GPUs.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.rollout.errors import EngineError


@dataclass(frozen=True)
class RankLocation:
    """Where a training rank sits."""

    host: str
    """Name of its machine."""
    gpu: str | None
    """Its GPU, by the id that ``CUDA_VISIBLE_DEVICES`` takes; ``None`` on a CPU."""
    on_ray: bool
    """Whether the GPU is the rank's own in Ray's books, as those of ranks that Ray has started are."""
    uuid: str | None = None
    """Of the GPU; ``None`` where no driver says it."""

    def __str__(self) -> str:
        return f"GPU {self.gpu} of {self.host}"

    def is_gpu_of(self, other: "RankLocation") -> bool:
        """Whether both have the same GPU.

        By UUID where both are known: in containers and under Slurm two processes may number the GPUs of one machine
        differently. By machine and id otherwise.

        Args:
            other: Of a rank, or of whoever Ray has given a GPU.
        """
        if self.gpu is None or other.gpu is None:
            return False
        if self.uuid and other.uuid:
            return self.uuid == other.uuid
        return (self.host, self.gpu) == (other.host, other.gpu)


@dataclass(frozen=True)
class ActorPlacement:
    """Where one engine runs."""

    options: dict[str, Any]
    """Of the Ray actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set in the engine's process before anything else."""
    not_on: tuple[RankLocation, ...] = ()
    """Whose GPUs it must not have."""


def my_seat(*, colocate: bool = False) -> RankLocation:
    """Where this rank sits.

    Args:
        colocate: An engine is to share the rank's GPU, whether the rank uses it yet or not. Else a GPU counts as the
            rank's when the process has begun to use it, as it has when a Trainer publishes weights.
    """
    import torch

    gpu = uuid = None
    if torch.cuda.is_available() and (colocate or torch.cuda.is_initialized()):
        index = torch.cuda.current_device()
        gpu = visible_gpus()[index]
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return RankLocation(socket.gethostname(), gpu, on_ray=gpu in _rays_gpus(), uuid=None if uuid is None else str(uuid))


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, by the ids that ``CUDA_VISIBLE_DEVICES`` takes, in CUDA's order."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return [name.strip() for name in named.split(",") if name.strip()]


def _rays_gpus() -> list[str]:
    """The GPUs that Ray has given to this process; none in one that Ray has not started."""
    if "ray" not in sys.modules:
        return []
    import ray

    worker = ray.is_initialized() and ray.get_runtime_context().get_actor_id()
    return [str(name) for name in ray.get_gpu_ids()] if worker else []


def _node_of(host: str) -> str:
    """Ray's id of a machine."""
    import ray

    names = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if host not in names:
        raise EngineError(
            f"VLLMPool(colocate=True) starts engines where the training ranks are, but {host} is not in Ray's cluster, "
            f"which has {sorted(names)}: start Ray there, or use launcher='ray'"
        )
    return str(names[host])


def seats_of_engines(
    seats: Sequence[RankLocation], num_engines: int, tensor_parallel_size: int
) -> list[list[RankLocation]]:
    """Which ranks' devices each colocated engine gets: engine i those of ranks i * T to (i + 1) * T - 1.

    Args:
        seats: Of all ranks, in order.
        num_engines: Engines.
        tensor_parallel_size: T, GPUs of each.

    Raises:
        EngineError: If there are fewer ranks than devices needed, or those of one engine are on several machines.
    """
    wanted = num_engines * tensor_parallel_size
    if wanted > len(seats) and any(seat.gpu is not None for seat in seats):
        raise EngineError(
            f"VLLMPool(colocate=True) puts {num_engines} engine(s) of {tensor_parallel_size} GPU(s) on the GPUs of the "
            f"training ranks, of which there are {len(seats)}: lower num_engines or tensor_parallel_size, or train on "
            "more devices"
        )
    shares = []
    for engine in range(num_engines):
        first = engine * tensor_parallel_size
        # Without GPUs several engines may share the machine of one rank.
        own = [seats[(first + index) % len(seats)] for index in range(tensor_parallel_size)]
        hosts = {seat.host for seat in own}
        if len(hosts) > 1:
            raise EngineError(
                f"engine {engine} would share the GPUs of ranks that are on {len(hosts)} machines; an engine lives on "
                f"one: choose a tensor_parallel_size that divides the ranks of a machine, not {tensor_parallel_size}"
            )
        shares.append(own)
    return shares


def beside_ranks(seats: Sequence[RankLocation], num_engines: int, tensor_parallel_size: int) -> list[ActorPlacement]:
    """Places of colocated engines.

    Args:
        seats: Of all ranks, in order.
        num_engines: Engines.
        tensor_parallel_size: GPUs of each.

    Raises:
        EngineError: If they do not fit, or the ranks' machines are not in Ray's cluster.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    places = []
    for own in seats_of_engines(seats, num_engines, tensor_parallel_size):
        on_gpu = own[0].gpu is not None
        options: dict[str, Any] = {
            # Cores are shared as well. GPUs are named in the environment: in Ray's books they are the rank's, or held
            # for it (gpu_reservation.py), so that no third is given them.
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(_node_of(own[0].host), soft=False),
        }
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(str(seat.gpu) for seat in own)} if on_gpu else {}
        places.append(ActorPlacement(options, environment))
    return places


class DedicatedPlacement:
    """Devices of their own for engines: one placement group, one bundle per engine, over as many machines as there are.

    A bundle is never divided, so the GPUs of an engine are on one machine; ``SPREAD`` puts engines on different ones
    where it can, and several on one where it must. An engine that is started again gets its bundle again; if the
    machine is gone, Ray moves the bundle.

    Args:
        num_engines: Bundles.
        cpus: Cores of each.
        gpus: GPUs of each.
        timeout: Seconds that Ray may take.
        ranks: Where the training ranks sit; no engine is started on a GPU of theirs.
        held: GPUs of Ray's that are held for ranks which Ray does not know of.

    Raises:
        EngineError: If the cluster is too small, or what it has is not free in time.
    """

    def __init__(
        self,
        num_engines: int,
        cpus: int,
        gpus: int,
        timeout: float,
        *,
        ranks: Sequence[RankLocation] = (),
        held: int = 0,
    ) -> None:
        import ray

        self._ranks = tuple(seat for seat in ranks if seat.gpu is not None)
        bundle: dict[str, float] = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        have = ray.cluster_resources()
        taken = {"GPU": held + sum(seat.on_ray for seat in self._ranks)}
        for name, each in sorted(bundle.items(), reverse=True):  # GPUs first: they are what is rare
            left = have.get(name, 0) - taken.get(name, 0)
            if left < each * num_engines:
                ranks_have = f", {taken[name]} of which the training ranks use" if taken.get(name) else ""
                cure = "lower VLLMPool(num_engines=..., tensor_parallel_size=...) or add machines"
                if name == "GPU" and self._ranks:
                    cure += ", train on fewer GPUs, or share them: VLLMPool(colocate=True)"
                raise EngineError(
                    f"{num_engines} engine(s) need {each * num_engines:g} {name}(s), but Ray's cluster has "
                    f"{have.get(name, 0):g}{ranks_have}: {cure}"
                )
        self._bundle = bundle
        self._group = ray.util.placement_group([bundle] * num_engines, strategy="SPREAD")
        if not self._group.wait(timeout):
            free = ray.available_resources()
            self.close()
            raise EngineError(
                f"Ray could not place {num_engines} engine(s) of {bundle} within {timeout:g} s; free are "
                f"{ {name: free.get(name, 0.0) for name in bundle} }: end what else uses the cluster, or add machines"
            )

    def places(self) -> list[ActorPlacement]:
        """One per engine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            ActorPlacement(
                {
                    "num_cpus": self._bundle["CPU"],
                    "num_gpus": self._bundle.get("GPU", 0),
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=engine
                    ),
                },
                not_on=self._ranks,
            )
            for engine in range(self._group.bundle_count)
        ]

    def close(self) -> None:
        """Give the resources back."""
        import ray

        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
