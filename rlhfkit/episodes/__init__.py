"""Samples of several turns: environments, tools and agents that talk to the policy.

May import: rollout, models, data, datamodules (how conversations are written), serving.
Start at :mod:`rlhfkit.episodes.episodes`, then ``environment.py``.
"""

from typing import TYPE_CHECKING, Any

from rlhfkit.episodes.environment import Action, Environment, Step

if TYPE_CHECKING:
    from rlhfkit.episodes.episodes import Episodes as Episodes
    from rlhfkit.episodes.gym import GymEnvironment as GymEnvironment
    from rlhfkit.episodes.mcp import MCPTools as MCPTools
    from rlhfkit.episodes.openai.agents import AgentEpisodes as AgentEpisodes
    from rlhfkit.episodes.openai.endpoint import OpenAIEndpoint as OpenAIEndpoint
    from rlhfkit.episodes.tools import ToolEnvironment as ToolEnvironment
    from rlhfkit.episodes.tools import tool_schemas as tool_schemas

_LAZY = {
    "AgentEpisodes": "rlhfkit.episodes.openai.agents",
    "Episodes": "rlhfkit.episodes.episodes",
    "GymEnvironment": "rlhfkit.episodes.gym",
    "MCPTools": "rlhfkit.episodes.mcp",
    "OpenAIEndpoint": "rlhfkit.episodes.openai.endpoint",
    "ToolEnvironment": "rlhfkit.episodes.tools",
    "tool_schemas": "rlhfkit.episodes.tools",
}

__all__ = ["Action", "Environment", "Step", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import a lazy name when it is first used (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
