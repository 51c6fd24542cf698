"""What Lightning iterates over: experience made while the epoch runs, and supervised data by optimizer step.

May import: torch and the ground of data.
Start at :mod:`rlhfkit.data.loaders.steps` (supervised) or ``experience.py`` (reinforcement learning).
"""
