"""Lightning callbacks: rollouts, sample tables, curves, exports, a guard. Hooks only; no algorithm lives here."""

from rlhfkit.callbacks.curves import TrainingCurves
from rlhfkit.callbacks.dump import RolloutDump
from rlhfkit.callbacks.ema import EMA
from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.guard import NonFiniteGuard
from rlhfkit.callbacks.invariants import InvariantError, Invariants
from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.callbacks.samples import SampleTable

__all__ = [
    "EMA",
    "HFExport",
    "InvariantError",
    "Invariants",
    "NonFiniteGuard",
    "RolloutCallback",
    "RolloutDump",
    "SampleTable",
    "TrainingCurves",
]
