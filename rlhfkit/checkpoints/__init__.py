"""What every strategy needs of checkpoints: exact resume, atomic and verified files, errors that say what to do.

May import: ``protocols.py``; modules, strategies and callbacks import this room.
Start at :mod:`rlhfkit.checkpoints.resume`.
"""

from rlhfkit.checkpoints.files import CheckpointError, VerifiedCheckpointIO
from rlhfkit.checkpoints.resume import ExactResume

__all__ = ["CheckpointError", "ExactResume", "VerifiedCheckpointIO"]
