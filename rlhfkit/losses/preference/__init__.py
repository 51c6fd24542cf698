"""Losses on preferences: DPO and its variants, reference-free losses, KTO, and reward models.

May import: torch and the files of losses above this folder.
Start at :mod:`rlhfkit.losses.preference.dpo`.
"""
