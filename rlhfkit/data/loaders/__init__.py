"""The loaders that Lightning iterates over: experience per iteration, and supervised data by optimizer step.

May import: torch and the files of data above this folder.
Start at :mod:`rlhfkit.data.loaders.steps` (supervised) or ``experience.py`` (reinforcement learning).
"""
