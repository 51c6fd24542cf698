"""Advantages from rewards: per group of samples, per token with a critic (GAE) or without, and reward shaping.

May import: torch and the files of losses above this folder.
Start at :mod:`rlhfkit.losses.advantages.group`.
"""
