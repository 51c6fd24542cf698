"""Lightning strategies: several DeepSpeed engines under one Trainer. Importing this registers ``rlhf_zero0`` to 3."""

from rlhfkit.strategies.deepspeed.strategy import RLHFDeepSpeedStrategy
from rlhfkit.strategies.registry import register

__all__ = ["RLHFDeepSpeedStrategy", "register"]

register()
