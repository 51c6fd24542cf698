"""Lightning callbacks: rollouts, sample tables, curves, exports. Hooks only; no algorithm lives here."""

from rlhfkit.callbacks.curves import TrainingCurves
from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.rollout import RolloutCallback
from rlhfkit.callbacks.samples import SampleTable

__all__ = ["HFExport", "RolloutCallback", "SampleTable", "TrainingCurves"]
