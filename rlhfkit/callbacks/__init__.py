"""Lightning callbacks: rollouts, tables of samples, the report of a run, exports, a guard. No algorithm lives here.

May import: rollout, rewards, models, data, checkpoints, ``parts.py``, ``protocols.py``; never modules, strategies or
datamodules. Start at :mod:`rlhfkit.callbacks.rollout.callback`; its parts are loaded when they are used.
"""

from typing import TYPE_CHECKING, Any

from rlhfkit.callbacks.dump import RolloutDump
from rlhfkit.callbacks.ema import EMA
from rlhfkit.callbacks.export import HFExport
from rlhfkit.callbacks.guard import NonFiniteGuard
from rlhfkit.callbacks.invariants import Invariants
from rlhfkit.callbacks.report.run_report import RunReport
from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.samples import SampleTable

if TYPE_CHECKING:
    from rlhfkit.callbacks.rollout.parts.ahead import Ahead as Ahead
    from rlhfkit.callbacks.rollout.parts.alarms import Alarm as Alarm
    from rlhfkit.callbacks.rollout.parts.alarms import Alarms as Alarms
    from rlhfkit.callbacks.rollout.parts.dynamic_sampling import DynamicSampling as DynamicSampling
    from rlhfkit.callbacks.rollout.parts.oversampling import Oversampling as Oversampling
    from rlhfkit.callbacks.rollout.parts.probe import Probe as Probe
    from rlhfkit.callbacks.rollout.parts.replay_buffer import ReplayBuffer as ReplayBuffer
    from rlhfkit.callbacks.rollout.parts.shared_devices import SharedDevices as SharedDevices
    from rlhfkit.callbacks.rollout.parts.validation import Validation as Validation

_PARTS = {
    "Ahead": "ahead",
    "Alarm": "alarms",
    "Alarms": "alarms",
    "DynamicSampling": "dynamic_sampling",
    "Oversampling": "oversampling",
    "Probe": "probe",
    "ReplayBuffer": "replay_buffer",
    "SharedDevices": "shared_devices",
    "Validation": "validation",
}
"""Names of rollout parts, and their files."""

__all__ = [
    "EMA",
    "HFExport",
    "Invariants",
    "NonFiniteGuard",
    "RolloutCallback",
    "RolloutDump",
    "RolloutPart",
    "RunReport",
    "SampleTable",
    *_PARTS,
]


def __getattr__(name: str) -> Any:
    """Import a part when it is first used (PEP 562)."""
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rlhfkit.callbacks.rollout.parts.{_PARTS[name]}"), name)
