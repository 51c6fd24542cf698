"""What every checkpoint of a run needs, whoever writes it: exact positions, whole files, errors that say what is there.

It imports nothing of ours: strategies, modules and callbacks all use it.
"""

from rlhfkit.checkpoints.errors import CheckpointError
from rlhfkit.checkpoints.files import VerifiedCheckpointIO
from rlhfkit.checkpoints.resume import ExactResume

__all__ = ["CheckpointError", "ExactResume", "VerifiedCheckpointIO"]
