"""Where a rank on Ray finds itself: its numbers and its device."""

import os

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities.exceptions import MisconfigurationException


class RayEnvironment(ClusterEnvironment):
    """The ranks' numbers as :mod:`rlhfkit.strategies.ray.ranks` has set them; the driver counts as rank 0.

    Setters do nothing: Lightning would compute a rank from its machine's number, as if all machines had equally many.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """True: the strategy's launcher starts them, Lightning's own does not."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port on it."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """False: it is chosen by the strategy."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Nothing."""

    def global_rank(self) -> int:
        """Among all ranks."""
        return int(os.environ.get("RANK", 0))

    def set_global_rank(self, rank: int) -> None:
        """Nothing."""

    def local_rank(self) -> int:
        """Among the ranks of this machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        """Of this machine, in the order of the ranks."""
        return int(os.environ.get("NODE_RANK", 0))

    def device(self, kind: str) -> torch.device:
        """This rank's device: of the GPUs that its machine's ranks share, the one with its local number."""
        return torch.device(kind, self.local_rank()) if kind == "cuda" else torch.device(kind)


class RemoteCUDAAccelerator(CUDAAccelerator):
    """GPUs that Ray will find for the ranks; the driver needs none.

    Lightning's own is refused on a machine without GPUs when the Trainer is made, and counts those of that machine.
    """

    @staticmethod
    def is_available() -> bool:
        """True: Ray says so later, when it places the ranks."""
        return True

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """``Trainer(devices=...)`` as a number per machine."""
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 1:
            RemoteCUDAAccelerator.auto_device_count()
        return list(range(count))

    @staticmethod
    def auto_device_count() -> int:
        """Cannot be known here."""
        raise MisconfigurationException(
            "This machine has no GPU to count, so Trainer(devices=...) must say how many ranks to start per machine."
        )

    @staticmethod
    def name() -> str:
        """Its own name: Lightning keeps a list of accelerators by name."""
        return "rlhf_remote_cuda"
