"""Records and batching for reinforcement learning. Importing this package loads torch and nothing else."""

from rlhfkit.data.experience import Experience, FinishReason, Prompt, Sample

__all__ = ["Experience", "FinishReason", "Prompt", "Sample"]
