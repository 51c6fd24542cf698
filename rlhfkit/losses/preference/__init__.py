"""Losses on preferences: DPO and its variants, reference-free ones, KTO, and reward models.

May import: torch and the ground of losses.
Start at :mod:`rlhfkit.losses.preference.dpo`.
"""
