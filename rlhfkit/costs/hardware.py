"""``GPU``: the numbers of an accelerator that costs depend on, a table of them, and the share of each that is reached.

Peaks are the vendors' dense figures (the data sheets quote twice as much with sparsity). What real kernels reach of
them is in :class:`Efficiency`, whose defaults can be replaced one by one.
"""

import dataclasses
from dataclasses import dataclass

from rlhfkit.validation import check_number

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One accelerator. Rates are per GPU and second."""

    name: str
    memory: float
    """Bytes that a program sees."""
    flops: float
    """Dense bfloat16 multiplications and additions, each counted once."""
    bandwidth: float
    """Bytes from and to its own memory."""
    link: float
    """Bytes to the other GPUs of its machine, one direction."""
    network: float = 50e9
    """Bytes to other machines: one 400 Gbit/s adapter per GPU."""
    source: str = ""

    def __post_init__(self) -> None:
        """Check every number."""
        for field in ("memory", "flops", "bandwidth", "link", "network"):
            check_number(f"GPU.{field}", getattr(self, field), above=0)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="A100-40GB",
            memory=39.4 * GIB,
            flops=312e12,
            bandwidth=1.555e12,
            link=300e9,
            network=25e9,
            source="NVIDIA A100 data sheet (2021): SXM4, 40 GB",
        ),
        GPU(
            name="A100",
            memory=79.1 * GIB,
            flops=312e12,
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            source="NVIDIA A100 data sheet (2021): SXM4, 80 GB",
        ),
        GPU(
            name="H100",
            memory=79.1 * GIB,
            flops=989e12,
            bandwidth=3.35e12,
            link=450e9,
            source="NVIDIA H100 data sheet (2023): SXM5, 80 GB",
        ),
        GPU(
            name="H200",
            memory=139.8 * GIB,
            flops=989e12,
            bandwidth=4.8e12,
            link=450e9,
            source="NVIDIA H200 data sheet (2024): SXM5, 141 GB",
        ),
        GPU(
            name="B200",
            memory=178.0 * GIB,
            flops=2250e12,
            bandwidth=8e12,
            link=900e9,
            source="NVIDIA DGX B200 data sheet (2024), an eighth of it",
        ),
        GPU(
            name="L40S",
            memory=44.4 * GIB,
            flops=362e12,
            bandwidth=0.864e12,
            link=32e9,
            network=12.5e9,
            source="NVIDIA L40S data sheet (2023): 48 GB, PCIe 4.0",
        ),
        GPU(
            name="MI300X",
            memory=191.5 * GIB,
            flops=1307e12,
            bandwidth=5.3e12,
            link=448e9,
            source="AMD Instinct MI300X data sheet (2023)",
        ),
    )
}
"""Known GPUs by name."""


def find_gpu(name: str | GPU) -> GPU:
    """The GPU of a name, upper and lower case alike, or the given one.

    Raises:
        ValueError: If the name is not in :data:`GPUS`; the message lists what is.
    """
    if isinstance(name, GPU):
        return name
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    if name.lower() not in by_name:
        raise ValueError(
            f"gpu must be one of {', '.join(GPUS)}, got {name!r}; for another one give estimate(gpu=GPU(name=..., "
            "memory=..., flops=..., bandwidth=..., link=...)), imported from rlhfkit.costs"
        )
    return by_name[name.lower()]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The share of a peak that is reached, above 0 and at most 1, and fixed costs in seconds."""

    train_flops: float = 0.40
    """In forward and backward passes with gradient (Llama 3 report, 2024, arXiv:2407.21783, table 4: 0.38 to 0.43)."""
    forward_flops: float = 0.50
    """In forward passes without gradient, prompts of an engine included."""
    decode_bandwidth: float = 0.60
    """Of the memory's bandwidth while an engine decodes."""
    link: float = 0.70
    """Of the bandwidth between GPUs in collectives of large buffers, in a machine or between machines."""
    decode_step: float = 1.5e-3
    """Seconds of an engine's step beside its kernels: scheduling, launches, sampling."""
    exposed_communication: float = 0.5
    """The share of ZeRO's communication that is not hidden behind computation."""
    host: float = 20e9
    """Bytes per second between a GPU and the host's memory (half of PCIe 4.0 x16's 32e9, or a third of 5.0's)."""
    storage: float = 1e9
    """Bytes per second that a rank writes of a checkpoint."""

    def __post_init__(self) -> None:
        """Check every number."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("decode_step", "storage", "host"):
                check_number(f"Efficiency.{field.name}", value, minimum=0)
            else:
                check_number(f"Efficiency.{field.name}", value, above=0, maximum=1)
