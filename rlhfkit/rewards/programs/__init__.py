"""Programs that a policy wrote, and their tests; see :class:`CodeExecution`."""

from rlhfkit.rewards.programs.execution import CodeExecution

__all__ = ["CodeExecution"]
