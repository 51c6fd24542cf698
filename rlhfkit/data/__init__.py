"""Records and batching: prompts, samples, experience, micro-batches and loaders; loads torch and NumPy, nothing else.

May import: torch, NumPy, ``validation.py``.
Start at :mod:`rlhfkit.data.types`, then ``batch.py``, ``packing.py`` and ``loaders/``.
"""

from rlhfkit.data.batch import TokenBatch, TokenExample, collate_tokens
from rlhfkit.data.formats import (
    DistilledBatch,
    PreferenceBatch,
    PreferenceExample,
    StepwiseBatch,
    UnpairedBatch,
    collate_preferences,
)
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.loaders.steps import ExampleTable, StepLoader
from rlhfkit.data.packing import IterationShape
from rlhfkit.data.types import Experience, Prompt, Sample, decode_texts

__all__ = [
    "DistilledBatch",
    "ExampleTable",
    "Experience",
    "ExperienceLoader",
    "IterationShape",
    "PreferenceBatch",
    "PreferenceExample",
    "Prompt",
    "Sample",
    "StepLoader",
    "StepwiseBatch",
    "TokenBatch",
    "TokenExample",
    "UnpairedBatch",
    "collate_preferences",
    "collate_tokens",
    "decode_texts",
]
