"""Where engines run: apart from the training ranks, or on the GPUs of these.

An engine lives on one machine. Apart, all engines form one Ray placement group of one bundle each, spread over the
machines that have room. Colocated, each is pinned to the devices of as many neighbouring ranks as it has GPUs.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.rollout.errors import EngineError

_COLOCATED_SHARE = 0.5
"""Of a GPU, claimed from Ray by an engine that shares it with a rank which Ray does not know of."""


@dataclass(frozen=True)
class Seat:
    """Where a training rank sits."""

    host: str
    """Name of its machine."""
    gpu: str | None
    """Its GPU, by the id that ``CUDA_VISIBLE_DEVICES`` takes; ``None`` on a CPU."""
    on_ray: bool
    """Whether the rank is a Ray actor: then the GPU is its own in Ray's books."""


@dataclass(frozen=True)
class Place:
    """Where one engine runs."""

    options: dict[str, Any]
    """Of the Ray actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set in the engine's process before anything else."""


def my_seat() -> Seat:
    """Where this rank sits."""
    import torch

    gpu = None
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        gpu = visible[index] if visible else str(index)
    return Seat(socket.gethostname(), gpu, on_ray=_is_actor())


def _is_actor() -> bool:
    if "ray" not in sys.modules:
        return False
    import ray

    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())


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


def seats_of_engines(seats: Sequence[Seat], num_engines: int, tensor_parallel_size: int) -> list[list[Seat]]:
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


def beside_ranks(seats: Sequence[Seat], num_engines: int, tensor_parallel_size: int) -> list[Place]:
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
            "num_cpus": 0,  # cores are shared as well
            # What is pinned is written in the environment; this much is claimed so that Ray gives the GPU to no third.
            "num_gpus": _COLOCATED_SHARE if on_gpu and not own[0].on_ray else 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(_node_of(own[0].host), soft=False),
        }
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(str(seat.gpu) for seat in own)} if on_gpu else {}
        places.append(Place(options, environment))
    return places


class Apart:
    """Devices of their own for engines: one placement group, one bundle per engine, over as many machines as there are.

    A bundle is never divided, so the GPUs of an engine are on one machine; ``SPREAD`` puts engines on different ones
    where it can, and several on one where it must. An engine that is started again gets its bundle again; if the
    machine is gone, Ray moves the bundle.

    Args:
        num_engines: Bundles.
        cpus: Cores of each.
        gpus: GPUs of each.
        timeout: Seconds that Ray may take.

    Raises:
        EngineError: If the cluster is too small, or what it has is not free in time.
    """

    def __init__(self, num_engines: int, cpus: int, gpus: int, timeout: float) -> None:
        import ray

        bundle: dict[str, float] = {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {})
        have = ray.cluster_resources()
        for name, each in bundle.items():
            if have.get(name, 0) < each * num_engines:
                raise EngineError(
                    f"{num_engines} engine(s) need {each * num_engines:g} {name}(s), but Ray's cluster has "
                    f"{have.get(name, 0):g}: lower VLLMPool(num_engines=..., tensor_parallel_size=...) or add machines"
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

    def places(self) -> list[Place]:
        """One per engine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            Place(
                {
                    "num_cpus": self._bundle["CPU"],
                    "num_gpus": self._bundle.get("GPU", 0),
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=engine
                    ),
                }
            )
            for engine in range(self._group.bundle_count)
        ]

    def close(self) -> None:
        """Give the resources back."""
        import ray

        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(self._group)
