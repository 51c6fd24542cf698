"""Child processes for code that may hang, die, eat memory or attack; see :class:`Sandbox`."""

from rlhfkit.rewards.sandbox.pool import START_TIMEOUT, Sandbox
from rlhfkit.rewards.sandbox.process import Limits, Outcome, Status, Work
from rlhfkit.rewards.sandbox.walls import WALLS, Backend, WeakSandbox

__all__ = ["START_TIMEOUT", "WALLS", "Backend", "Limits", "Outcome", "Sandbox", "Status", "WeakSandbox", "Work"]
