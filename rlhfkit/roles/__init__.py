"""Roles of RLHF on machines of their own: frozen models in Ray actors or behind servers, and who is where.

Each name is imported on first use: the process of a replica imports what it computes with, and no Lightning.

May import: parts, data, models, rollout, distributed, ray_session, ray_placement, and Ray when used.
Start at :mod:`rlhfkit.roles.model_pool`; :mod:`rlhfkit.roles.placement` places all roles of a run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfkit.ray_placement import PlacementError as PlacementError
    from rlhfkit.roles.critic_pool import CriticPool as CriticPool
    from rlhfkit.roles.critic_pool import CriticPoolError as CriticPoolError
    from rlhfkit.roles.frozen_model import ModelPoolError as ModelPoolError
    from rlhfkit.roles.model_pool import ModelPool as ModelPool
    from rlhfkit.roles.placement import Placement as Placement
    from rlhfkit.roles.placement import RoleResources as RoleResources
    from rlhfkit.roles.served_model import ServedModel as ServedModel

_HOMES = {
    "CriticPool": "roles.critic_pool",
    "CriticPoolError": "roles.critic_pool",
    "ModelPool": "roles.model_pool",
    "ModelPoolError": "roles.frozen_model",
    "Placement": "roles.placement",
    "PlacementError": "ray_placement",
    "RoleResources": "roles.placement",
    "ServedModel": "roles.served_model",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhfkit.roles' has no attribute {name!r}")
    value = getattr(import_module(f"rlhfkit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
