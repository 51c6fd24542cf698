"""What a run will need before it starts: bytes per GPU by role and a coarse time, by closed formulas.

Nothing is trained and no weights are loaded; models are described by their configuration and built without memory.

May import: everything but ``cli/``. Start at :func:`rlhfkit.costs.estimate`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhfkit.costs.run import GPU, GPUS

if TYPE_CHECKING:
    from rlhfkit.costs.estimation import MemoryCheck, estimate
    from rlhfkit.costs.throughput import Throughput

__all__ = ["GPU", "GPUS", "MemoryCheck", "Throughput", "estimate"]


def __getattr__(name: str) -> Any:
    """Import what loads Lightning on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'rlhfkit.costs' has no attribute {name!r}")
    return getattr(import_module(f"rlhfkit.costs.{'throughput' if name == 'Throughput' else 'estimation'}"), name)
