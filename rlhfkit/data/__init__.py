"""Records and batching: prompts, samples, experience, micro-batches and loaders; loads torch and NumPy, nothing else.

May import: torch, NumPy, ``validation.py``.
Start at :mod:`rlhfkit.data.types`, then ``batch.py``, ``packing.py`` and ``loaders/``.
"""

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import PreferenceBatch
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.data.types import Experience, Prompt, Sample

__all__ = ["Experience", "PreferenceBatch", "Prompt", "Sample", "StepLoader", "TokenBatch"]
