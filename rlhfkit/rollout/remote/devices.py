"""``EngineDevices``: the Ray cluster and the devices that the engines of a pool run on, from the start to the end."""

from rlhfkit.rollout.remote.gpu_reservation import GPUReservation
from rlhfkit.rollout.remote.placement import (
    ActorPlacement,
    DedicatedPlacement,
    RankLocation,
    check_locations,
    start_ray_for_engines,
    why_ray_has_few_gpus,
)


class EngineDevices:
    """What is held for a pool's engines on devices of their own. Used on rank 0.

    Args:
        num_engines: Engines of the pool.
        processes_per_engine: Processes of an engine, each with a device.
        cpus_per_engine: Cores of an engine; on CPUs of each of its processes.
        timeout: Seconds to wait for devices.
    """

    def __init__(self, num_engines: int, processes_per_engine: int, cpus_per_engine: int, timeout: float) -> None:
        self.num_engines = num_engines
        self.processes_per_engine = processes_per_engine
        self.cpus_per_engine = cpus_per_engine
        self.timeout = timeout
        self.reservation: GPUReservation | None = None
        """The ranks' GPUs, kept from Ray, if it does not know that they are in use."""
        self._dedicated: DedicatedPlacement | None = None
        self._note = ""  # for an error about too few GPUs

    def connect_to_ray(self, ranks: list[RankLocation], *, device: str | None, reserves: bool) -> str:
        """Join or start Ray, keep it from assigning the ranks' GPUs, and return the device, ``"cpu"`` or ``"cuda"``.

        Args:
            ranks: All training ranks; empty without a trainer.
            device: The device that was asked for; ``None``: GPUs if the cluster or a rank has one.
            reserves: Whether the ranks' GPUs have to be kept from Ray.
        """
        import ray

        check_locations(ranks)
        self.close()  # devices of engines that could not be started, before others are tried
        processes = self.num_engines * self.processes_per_engine
        started_here = start_ray_for_engines(num_cpus=processes * self.cpus_per_engine, ranks=ranks)
        gpus = ray.cluster_resources().get("GPU", 0) or any(rank.gpu is not None for rank in ranks)
        device = device or ("cuda" if gpus else "cpu")
        if device == "cuda" and not started_here and reserves:
            self.reservation = GPUReservation(ranks, self.timeout)
        self._note = why_ray_has_few_gpus(ranks) if started_here and device == "cuda" else ""
        return device

    def placements(self, device: str, ranks: list[RankLocation], *, spans_machines: bool) -> list[ActorPlacement]:
        """Hold devices for every engine; EngineError if the cluster has no room.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            ranks: All training ranks.
            spans_machines: Whether the processes of an engine may be on several machines.
        """
        processes = self.processes_per_engine
        self._dedicated = DedicatedPlacement(
            self.num_engines,
            self.cpus_per_engine * (processes if device == "cpu" else 1),
            processes if device == "cuda" else 0,
            self.timeout,
            ranks=ranks,
            held=() if self.reservation is None else self.reservation.gpus,
            processes=processes if spans_machines else 1,
            note=self._note,
        )
        return self._dedicated.placements()

    def close(self) -> None:
        """Give the devices back."""
        for held in (self._dedicated, self.reservation):
            if held is not None:
                held.close()
        self._dedicated, self.reservation = None, None
