"""Engines that generate samples: in this process, vLLM in Ray actors, running servers. Heavy packages load when used.

May import: models, losses, data, ``distributed.py``, ``validation.py``.
Start at :mod:`rlhfkit.rollout.engine` (the interface), then ``local/``, ``vllm/`` or ``server/``.
"""

from typing import TYPE_CHECKING, Any

from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightInfo, WeightSource, sample_seed
from rlhfkit.rollout.replay_buffer import ReplayBuffer
from rlhfkit.rollout.supervision.health import HealthPolicy

if TYPE_CHECKING:
    from rlhfkit.rollout.local.engine import LocalEngine as LocalEngine
    from rlhfkit.rollout.replay import ReplayEngine as ReplayEngine
    from rlhfkit.rollout.server.engine import VLLMServer as VLLMServer
    from rlhfkit.rollout.vllm.pool import VLLMPool as VLLMPool
    from rlhfkit.rollout.weight_sync.source import ModuleWeights as ModuleWeights
    from rlhfkit.rollout.wrappers.mixture import ReferenceMixture as ReferenceMixture
    from rlhfkit.rollout.wrappers.reference_samples import ReferenceSamples as ReferenceSamples

_LAZY = {
    "LocalEngine": "rlhfkit.rollout.local.engine",
    "ModuleWeights": "rlhfkit.rollout.weight_sync.source",
    "ReferenceMixture": "rlhfkit.rollout.wrappers.mixture",
    "ReferenceSamples": "rlhfkit.rollout.wrappers.reference_samples",
    "ReplayEngine": "rlhfkit.rollout.replay",
    "VLLMPool": "rlhfkit.rollout.vllm.pool",
    "VLLMServer": "rlhfkit.rollout.server.engine",
}

__all__ = [
    "DynamicSampling",
    "HealthPolicy",
    "LocalEngine",
    "ModuleWeights",
    "ReferenceMixture",
    "ReferenceSamples",
    "ReplayBuffer",
    "ReplayEngine",
    "RolloutEngine",
    "SamplingSpec",
    "VLLMPool",
    "VLLMServer",
    "WeightInfo",
    "WeightSource",
    "sample_seed",
]


def __getattr__(name: str) -> Any:
    """Import a lazy name when it is first used (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
