"""Records and batching: prompts, samples, experience, micro-batches and loaders; loads torch and NumPy, nothing else.

May import: torch, NumPy, ``validation.py``.
Start at :mod:`rlhfkit.data.types`, then ``batch.py``, ``packing/`` and ``loaders/``.
"""

from rlhfkit.data.batch import PaddedBatch, StepTotals, TokenBatch, TokenExample, collate_tokens
from rlhfkit.data.formats.distilled import DistilledBatch, DistilledExample, DistilledExamples, collate_distilled
from rlhfkit.data.formats.preferences import PreferenceBatch, PreferenceExample, PreferenceExamples, collate_preferences
from rlhfkit.data.formats.stepwise import StepwiseBatch, StepwiseExample, StepwiseExamples, collate_stepwise
from rlhfkit.data.formats.unpaired import (
    UnpairedBatch,
    UnpairedExample,
    UnpairedExamples,
    UnpairedLoader,
    collate_unpaired,
)
from rlhfkit.data.loaders.experience import ExperienceLoader
from rlhfkit.data.loaders.steps import StepLoader
from rlhfkit.data.packing import IterationShape, MicroBatch, balanced_partition, iteration_shape, plan_micro_batches
from rlhfkit.data.types import Experience, FinishReason, Prompt, Sample, decode_texts

__all__ = [
    "DistilledBatch",
    "DistilledExample",
    "DistilledExamples",
    "Experience",
    "ExperienceLoader",
    "FinishReason",
    "IterationShape",
    "MicroBatch",
    "PaddedBatch",
    "PreferenceBatch",
    "PreferenceExample",
    "PreferenceExamples",
    "Prompt",
    "Sample",
    "StepLoader",
    "StepTotals",
    "StepwiseBatch",
    "StepwiseExample",
    "StepwiseExamples",
    "TokenBatch",
    "TokenExample",
    "UnpairedBatch",
    "UnpairedExample",
    "UnpairedExamples",
    "UnpairedLoader",
    "balanced_partition",
    "collate_distilled",
    "collate_preferences",
    "collate_stepwise",
    "collate_tokens",
    "collate_unpaired",
    "decode_texts",
    "iteration_shape",
    "plan_micro_batches",
]
