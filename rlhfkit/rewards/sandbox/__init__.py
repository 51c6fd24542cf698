"""Child processes with limits and isolation, for code that may hang, crash, use up memory or attack the trainer.

``process.py`` runs one sandbox, ``child.py`` is what runs inside it, ``isolation.py`` names the isolation layers.

May import: ``validation.py``; ``reward.py`` also the rest of rewards, and data.
Start at :mod:`rlhfkit.rewards.sandbox.pool`.
"""

from rlhfkit.rewards.sandbox.isolation import ISOLATION_LAYERS, InsufficientIsolationError
from rlhfkit.rewards.sandbox.pool import START_TIMEOUT, SandboxPool
from rlhfkit.rewards.sandbox.process import CallResult, ResourceLimits, Status, WorkerSpec

__all__ = [
    "ISOLATION_LAYERS",
    "START_TIMEOUT",
    "CallResult",
    "InsufficientIsolationError",
    "ResourceLimits",
    "SandboxPool",
    "Status",
    "WorkerSpec",
]
