"""Child processes for code that may hang, die, eat memory or attack; see :class:`Sandbox`."""

from rlhfkit.rewards.sandbox.pool import START_TIMEOUT, Sandbox
from rlhfkit.rewards.sandbox.process import Limits, Outcome, Status, Work

__all__ = ["START_TIMEOUT", "Limits", "Outcome", "Sandbox", "Status", "Work"]
