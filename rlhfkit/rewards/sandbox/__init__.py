"""Child processes for code that may hang, die, eat memory or attack; see :class:`Sandbox`."""

from rlhfkit.rewards.sandbox.isolation import WALLS, Backend, WeakSandbox
from rlhfkit.rewards.sandbox.pool import START_TIMEOUT, Sandbox
from rlhfkit.rewards.sandbox.process import Limits, Outcome, Status, Work

__all__ = ["START_TIMEOUT", "WALLS", "Backend", "Limits", "Outcome", "Sandbox", "Status", "WeakSandbox", "Work"]
