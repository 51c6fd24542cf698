"""What a run will need before it starts: bytes per GPU and seconds per iteration, by closed formulas.

Nothing is trained and no weights are loaded; models are described by their configuration and built without memory.

May import: everything but ``cli/``; the formulas (``memory/``, ``seconds.py``) only models.
Start at :func:`rlhfkit.costs.estimation.estimate`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlhfkit.costs.hardware import GPU, GPUS, Efficiency, find_gpu
from rlhfkit.costs.long_rows import LongestRow, longest_row, longest_rows
from rlhfkit.costs.model_shape import LayerShape, ModelShape, model_shape
from rlhfkit.costs.run import EngineShape, PlacedModel, Precision, Run, Sharding

if TYPE_CHECKING:
    from rlhfkit.costs.estimation import Estimate, estimate, estimate_run
    from rlhfkit.costs.memory_check import MemoryCheck

_LAZY = {  # they load Lightning
    "Estimate": "estimation",
    "estimate": "estimation",
    "estimate_run": "estimation",
    "MemoryCheck": "memory_check",
}

__all__ = [
    "GPU",
    "GPUS",
    "Efficiency",
    "EngineShape",
    "Estimate",
    "LayerShape",
    "LongestRow",
    "MemoryCheck",
    "ModelShape",
    "PlacedModel",
    "Precision",
    "Run",
    "Sharding",
    "estimate",
    "estimate_run",
    "find_gpu",
    "longest_row",
    "longest_rows",
    "model_shape",
]


def __getattr__(name: str) -> Any:
    """Import what loads Lightning on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module 'rlhfkit.costs' has no attribute {name!r}")
    return getattr(import_module(f"rlhfkit.costs.{_LAZY[name]}"), name)
