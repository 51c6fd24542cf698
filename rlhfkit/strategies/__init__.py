"""Lightning strategies: several DeepSpeed engines under one Trainer. Importing this registers ``rlhf_zero0`` to 3.

May import: checkpoints, ``protocols.py``, ``distributed.py``, ``mesh.py``, ``ray_session.py``,
``ray_placement.py`` and ``validation.py`` only, so that any LightningModule can use it.
Start at :mod:`rlhfkit.strategies.strategy`.
"""

from rlhfkit.strategies.forward_groups import SequenceParallelDDPStrategy
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy, register

__all__ = ["RLHFDeepSpeedStrategy", "SequenceParallelDDPStrategy"]

register()
