"""Attention over packed rows, and which model families can be given them.

May import: torch and Transformers.
Start at :mod:`rlhfkit.models.attention.packed`; ``families.py`` tries a family on a tiny copy (``tiny_config.py``).
"""
