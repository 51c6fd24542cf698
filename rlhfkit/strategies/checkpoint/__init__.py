"""Checkpoints of runs whose weights live in DeepSpeed engines: directories that are whole or not there.

May import: ``rlhfkit.checkpoints`` and ``strategies.deepspeed``; nothing else of rlhfkit.
Start at :mod:`rlhfkit.strategies.checkpoint.io`; ``universal.py`` resumes with another number of ranks.
"""
