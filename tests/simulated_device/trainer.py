"""A Lightning accelerator and strategy for the simulated device."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from simulated_device.device import register


class SimulatedAccelerator(Accelerator):
    """One simulated device."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """None."""
        return {}

    def teardown(self) -> None:
        """Nothing to free."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Unchanged."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The only device."""
        return [register()]

    @staticmethod
    def auto_device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Yes."""
        return True

    @staticmethod
    def name() -> str:
        """As Lightning prints it."""
        return "simulated"


def trainer_arguments() -> dict[str, Any]:
    """Arguments of a Trainer that trains on the simulated device, which is registered."""
    return {
        "accelerator": "auto",  # that of the strategy
        "devices": 1,
        "strategy": SingleDeviceStrategy(device=register(), accelerator=SimulatedAccelerator()),
        # Parameters that are created or replaced in inference mode could not be trained afterwards.
        "inference_mode": False,
    }
