"""Roles of RLHF on machines of their own: frozen models in Ray actors beside the training ranks.

May import: data, models, distributed, ray_session, and Ray when used.
Start at :mod:`rlhfkit.roles.model_pool`.
"""

from rlhfkit.roles.model_pool import ModelPool, ModelPoolError

__all__ = ["ModelPool", "ModelPoolError"]
