"""Attention over packed rows, and which model families support it.

May import: torch and Transformers.
Start at :mod:`rlhfkit.models.attention.packed`; ``families.py`` says which families can be packed.
"""
