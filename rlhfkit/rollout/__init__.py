"""Rollouts: the engine protocol, the in-process engine, and Ray-hosted vLLM engines. Heavy packages load when used."""

from typing import TYPE_CHECKING, Any

from rlhfkit.rollout.dynamic_sampling import DynamicSampling
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightInfo, WeightSource, sample_seed
from rlhfkit.rollout.environment import Action, Environment, Step
from rlhfkit.rollout.health import HealthPolicy

if TYPE_CHECKING:
    from rlhfkit.rollout.agents import AgentEngine as AgentEngine
    from rlhfkit.rollout.episodes import EpisodeEngine as EpisodeEngine
    from rlhfkit.rollout.local import LocalEngine as LocalEngine
    from rlhfkit.rollout.openai_endpoint import OpenAIEndpoint as OpenAIEndpoint
    from rlhfkit.rollout.pool import VLLMPool as VLLMPool
    from rlhfkit.rollout.replay import ReplayEngine as ReplayEngine
    from rlhfkit.rollout.tools import ToolEnvironment as ToolEnvironment
    from rlhfkit.rollout.tools import tool_schemas as tool_schemas
    from rlhfkit.rollout.transfer import ModuleWeights as ModuleWeights

_LAZY = {
    "AgentEngine": "rlhfkit.rollout.agents",
    "EpisodeEngine": "rlhfkit.rollout.episodes",
    "LocalEngine": "rlhfkit.rollout.local",
    "ModuleWeights": "rlhfkit.rollout.transfer",
    "OpenAIEndpoint": "rlhfkit.rollout.openai_endpoint",
    "ReplayEngine": "rlhfkit.rollout.replay",
    "ToolEnvironment": "rlhfkit.rollout.tools",
    "VLLMPool": "rlhfkit.rollout.pool",
    "tool_schemas": "rlhfkit.rollout.tools",
}

__all__ = [
    "Action",
    "AgentEngine",
    "DynamicSampling",
    "Environment",
    "EpisodeEngine",
    "HealthPolicy",
    "LocalEngine",
    "ModuleWeights",
    "OpenAIEndpoint",
    "ReplayEngine",
    "RolloutEngine",
    "SamplingSpec",
    "Step",
    "ToolEnvironment",
    "VLLMPool",
    "WeightInfo",
    "WeightSource",
    "sample_seed",
    "tool_schemas",
]


def __getattr__(name: str) -> Any:
    """Import a lazy name when it is first used (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
