"""Lightning strategies: several DeepSpeed engines under one Trainer. Importing this registers ``rlhf_zero0`` to 3."""

from rlhfkit.strategies.registry import register
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

__all__ = ["RLHFDeepSpeedStrategy", "register"]

register()
