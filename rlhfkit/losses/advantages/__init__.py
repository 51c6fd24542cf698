"""Advantages from rewards: of groups of samples, of tokens with a critic (GAE) or without, and reward shaping.

May import: torch and the ground of losses.
Start at :mod:`rlhfkit.losses.advantages.group`.
"""
