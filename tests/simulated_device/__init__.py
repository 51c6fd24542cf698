"""A simulated GPU: real numbers on the CPU, a GPU's errors where devices mix, and a list of all waits of the host.

:func:`register` adds the device ``sim`` to PyTorch, for the rest of the process: use it in a process of its own, as
``test_device.py`` does with ``ranks.run("simulated_device.test_device:...", ranks=1, folder=...)``. Models and tensors
move to it with ``.to("sim")``; ``Trainer(**trainer_arguments())`` trains on it; :func:`record_host_waits` records.
``docs/dev/testing.md`` says what it can show and what not.
"""

from simulated_device.device import SimulatedTensor, register, trainer_arguments
from simulated_device.host_waits import HostWaits, record_host_waits

__all__ = [
    "HostWaits",
    "SimulatedTensor",
    "record_host_waits",
    "register",
    "trainer_arguments",
]
