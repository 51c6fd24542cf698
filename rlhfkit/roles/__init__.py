"""Roles of RLHF on machines of their own: frozen models in Ray actors or behind servers, and who is where.

May import: data, models, rollout, distributed, ray_session, ray_resources, and Ray when used.
Start at :mod:`rlhfkit.roles.model_pool`; :mod:`rlhfkit.roles.placement` places all roles of a run.
"""

from rlhfkit.ray_resources import PlacementError
from rlhfkit.roles.critic_pool import CriticPool, CriticPoolError
from rlhfkit.roles.frozen_model import FrozenModel, frozen_model
from rlhfkit.roles.model_pool import ModelPool
from rlhfkit.roles.pending_rows import ModelPoolError
from rlhfkit.roles.placement import Placement
from rlhfkit.roles.role_resources import RoleResources
from rlhfkit.roles.served_model import ServedModel

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
    "frozen_model",
]
