"""A Lightning accelerator and strategy for the simulated device."""

from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from simulated_device.device import register


class SimulatedAccelerator(CPUAccelerator):
    """One simulated device, of which Lightning has as little to do as of the CPU."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The only device."""
        return [register()]

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
