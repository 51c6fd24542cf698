"""Lightning callbacks: rollouts, sample tables, curves. Hooks only; no algorithm lives here."""

from rlhfkit.callbacks.curves import TrainingCurves
from rlhfkit.callbacks.rollout import RolloutCallback
from rlhfkit.callbacks.samples import SampleTable

__all__ = ["RolloutCallback", "SampleTable", "TrainingCurves"]
