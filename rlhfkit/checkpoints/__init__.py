"""Parts of every checkpoint: exact positions in the data, files that are whole, errors that say what is there.

May import: nothing of rlhfkit; strategies, modules and callbacks all use it.
Start at :mod:`rlhfkit.checkpoints.resume`.
"""

from rlhfkit.checkpoints.errors import CheckpointError
from rlhfkit.checkpoints.files import VerifiedCheckpointIO
from rlhfkit.checkpoints.resume import ExactResume

__all__ = ["CheckpointError", "ExactResume", "VerifiedCheckpointIO"]
