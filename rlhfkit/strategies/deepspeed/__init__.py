"""Several DeepSpeed engines under one Trainer, one for each trained child of the module.

May import: the checkpoints and Ray ranks of this room, and DeepSpeed, when used; nothing else of rlhfkit.
Start at :mod:`rlhfkit.strategies.strategy`, then ``building.py`` and ``engines.py``.
"""
