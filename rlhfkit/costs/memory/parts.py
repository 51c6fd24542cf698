"""``MemoryPart``: bytes of one part of a run's memory, where it is, and in which phases of an iteration."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfkit.costs.hardware import GIB

PHASES = ("sync", "generate", "prepare", "train", "update")
"""Of an iteration, in which different things are in memory: ``sync`` sends weights to engines, ``train`` is forward and
backward passes, ``update`` the optimizer's step."""
TRAINING, ENGINE, HOST = "training GPU", "engine GPU", "host, per rank"
"""Where parts are."""
RUNTIME_BYTES = 1.5 * GIB
"""CUDA's context, kernels and NCCL's buffers in a process on a GPU."""
FRAGMENTATION = 0.03
"""The share of a GPU's memory that PyTorch's allocator cannot use."""


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one part."""

    place: str
    role: str
    part: str
    bytes: float
    phases: tuple[str, ...] = PHASES


def phase_bytes(parts: Sequence[MemoryPart], place: str) -> dict[str, float]:
    """Bytes at one place in each phase; phases without any part there are left out."""
    totals = {
        phase: sum(part.bytes for part in parts if part.place == place and phase in part.phases) for phase in PHASES
    }
    return {phase: total for phase, total in totals.items() if total}


def in_gib(size: float) -> str:
    """A number of bytes in words."""
    return f"{size / GIB:.1f} GiB" if size < 1024 * GIB else f"{size / GIB / 1024:.2f} TiB"
