"""Roles of RLHF on machines of their own: frozen models in Ray actors beside the training ranks, and who is where.

May import: data, models, rollout, distributed, ray_session, ray_resources, and Ray when used.
Start at :mod:`rlhfkit.roles.model_pool`; :mod:`rlhfkit.roles.placement` places all roles of a run.
"""

from rlhfkit.ray_resources import PlacementError
from rlhfkit.roles.model_pool import ModelPool
from rlhfkit.roles.pending_rows import ModelPoolError
from rlhfkit.roles.placement import Placement
from rlhfkit.roles.role_resources import RoleResources

__all__ = ["ModelPool", "ModelPoolError", "Placement", "PlacementError", "RoleResources"]
