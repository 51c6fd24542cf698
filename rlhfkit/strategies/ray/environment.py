"""The environment of a rank on Ray for Lightning: its rank numbers, its device, an accelerator on other machines."""

import os

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator


class RayEnvironment(ClusterEnvironment):
    """Rank numbers from the variables that :mod:`rlhfkit.strategies.ray.ranks` has set; 0 in the driver.

    Setters do nothing: Lightning would compute the rank as if all machines had equally many ranks.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """True, so that Lightning does not start processes."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port on the host of rank 0."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """False: the strategy chooses this environment."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def global_rank(self) -> int:
        """Rank among all ranks."""
        return int(os.environ.get("RANK", 0))

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""

    def local_rank(self) -> int:
        """Rank among those of this machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        """Number of this machine, in the order of the ranks."""
        return int(os.environ.get("NODE_RANK", 0))

    def device(self, kind: str) -> torch.device:
        """Return this rank's device: all ranks of a machine see the same GPUs, and each uses that of its local rank."""
        return torch.device(kind, self.local_rank()) if kind == "cuda" else torch.device(kind)


class RemoteCUDAAccelerator(CUDAAccelerator):
    """GPUs on machines that Ray will choose; Lightning's own accelerator needs them on the driver's machine."""

    @staticmethod
    def is_available() -> bool:
        """True: Ray finds out when it places the ranks."""
        return True

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Convert ``Trainer(devices=...)`` to device numbers, as many as ranks per machine."""
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 1:
            RemoteCUDAAccelerator.auto_device_count()
        return list(range(count))

    @staticmethod
    def auto_device_count() -> int:
        """Raise MisconfigurationException: GPUs of other machines cannot be counted here."""
        raise MisconfigurationException(
            "This machine has no GPU to count, so Trainer(devices=...) must say how many ranks to start per machine."
        )

    @staticmethod
    def name() -> str:
        """Name in Lightning's registry of accelerators."""
        return "rlhf_remote_cuda"
