"""Lightning callbacks: rollouts, tables of samples, the report of a run, exports, a guard. No algorithm lives here.

May import: rollout, rewards, models, data, checkpoints, ``protocols.py``; never modules, strategies or datamodules.
Start at :mod:`rlhfkit.callbacks.rollout.callback`.
"""

from rlhfkit.callbacks.dump import RolloutDump
from rlhfkit.callbacks.ema import EMA
from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.guard import NonFiniteGuard
from rlhfkit.callbacks.invariants import InvariantError, Invariants
from rlhfkit.callbacks.report.run_report import RunReport
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
    "RunReport",
    "SampleTable",
]
