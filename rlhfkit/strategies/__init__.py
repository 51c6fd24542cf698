"""Lightning strategies: several DeepSpeed engines under one Trainer. Importing this registers ``rlhf_zero0`` to 3.

May import: checkpoints and the files on the ground of rlhfkit (``protocols.py``, ``distributed.py``, ``ray_session.py``,
``validation.py``); so any LightningModule can use it.
Start at :mod:`rlhfkit.strategies.strategy`.
"""

from rlhfkit.strategies.registry import register
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

__all__ = ["RLHFDeepSpeedStrategy", "register"]

register()
