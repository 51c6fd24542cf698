"""Roles of RLHF on machines of their own: frozen models in Ray actors or behind servers, and who is where.

Each name is imported on first use: the process of a replica imports what it computes with, and no Lightning.

May import: parts, data, models, rollout, distributed, ray_session, ray_placement, and Ray when used.
Start at :mod:`rlhfkit.roles.model_pool`; :mod:`rlhfkit.roles.placement` places all roles of a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfkit.ray_placement import PlacementError
    from rlhfkit.roles.critic_pool import CriticPool, CriticPoolError
    from rlhfkit.roles.frozen_model import FrozenModel, ModelPoolError
    from rlhfkit.roles.model_pool import ModelPool
    from rlhfkit.roles.placement import Placement, RoleResources
    from rlhfkit.roles.served_model import ServedModel

_HOMES = {
    "CriticPool": "roles.critic_pool",
    "CriticPoolError": "roles.critic_pool",
    "FrozenModel": "roles.frozen_model",
    "ModelPool": "roles.model_pool",
    "ModelPoolError": "roles.frozen_model",
    "Placement": "roles.placement",
    "PlacementError": "ray_placement",
    "RoleResources": "roles.placement",
    "ServedModel": "roles.served_model",
}

__all__ = [
    "CriticPool",
    "CriticPoolError",
    "FrozenModel",
    "ModelPool",
    "ModelPoolError",
    "Placement",
    "PlacementError",
    "RoleResources",
    "ServedModel",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhfkit.roles' has no attribute {name!r}")
    value = getattr(import_module(f"rlhfkit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
