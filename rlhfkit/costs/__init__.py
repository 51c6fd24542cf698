"""What a run will need before it starts: bytes per GPU and seconds per iteration, by closed formulas.

Nothing is trained and no weights are loaded; models are described by their configuration and built without memory.

May import: models, validation.
Start at :mod:`rlhfkit.costs.memory`; the formulas are there, in ``activations.py`` and in ``seconds.py``.
"""

from rlhfkit.costs.hardware import GPU, GPUS, Efficiency, find_gpu
from rlhfkit.costs.model_shape import LayerShape, ModelShape, model_shape
from rlhfkit.costs.run import EngineShape, Precision, Run, Sharding

__all__ = [
    "GPU",
    "GPUS",
    "Efficiency",
    "EngineShape",
    "LayerShape",
    "ModelShape",
    "Precision",
    "Run",
    "Sharding",
    "find_gpu",
    "model_shape",
]
