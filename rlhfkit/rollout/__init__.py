"""Engines that generate samples: in this process, vLLM in Ray actors, running servers. Heavy packages load when used.

May import: models, losses, data, ``distributed.py``, ``validation.py``.
Start at :mod:`rlhfkit.rollout.engine` (the interface), then ``local/``, ``vllm/`` or ``server/``.
"""

from typing import TYPE_CHECKING, Any

from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource, sample_seed
from rlhfkit.rollout.supervision.health import HealthPolicy

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import GroupFunction as GroupFunction
    from rlhfkit.rollout.groups import GroupSampler as GroupSampler
    from rlhfkit.rollout.groups import sample_groups as sample_groups
    from rlhfkit.rollout.local.engine import LocalEngine as LocalEngine
    from rlhfkit.rollout.replay import ReplayEngine as ReplayEngine
    from rlhfkit.rollout.server.engine import VLLMServer as VLLMServer
    from rlhfkit.rollout.vllm.pool import VLLMPool as VLLMPool
    from rlhfkit.rollout.weight_sync.source import ModuleWeights as ModuleWeights

_LAZY = {
    "GroupFunction": "rlhfkit.rollout.groups",
    "GroupSampler": "rlhfkit.rollout.groups",
    "LocalEngine": "rlhfkit.rollout.local.engine",
    "ModuleWeights": "rlhfkit.rollout.weight_sync.source",
    "ReplayEngine": "rlhfkit.rollout.replay",
    "VLLMPool": "rlhfkit.rollout.vllm.pool",
    "VLLMServer": "rlhfkit.rollout.server.engine",
    "sample_groups": "rlhfkit.rollout.groups",
}

__all__ = [
    "HealthPolicy",
    "RolloutEngine",
    "SamplingSpec",
    "WeightSource",
    "sample_seed",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    """Import a lazy name when it is first used (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
