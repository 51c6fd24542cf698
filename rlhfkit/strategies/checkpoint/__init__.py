"""Checkpoints of runs whose weights live in DeepSpeed engines: atomic directories, resumed with any number of ranks.

May import: ``rlhfkit.checkpoints``, ``distributed.py`` and ``strategies.deepspeed``.
Start at :mod:`rlhfkit.strategies.checkpoint.io`; ``universal.py`` resumes with another number of ranks.
"""
