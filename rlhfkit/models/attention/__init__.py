"""Attention over packed rows, and the check of which model families support it.

May import: torch and Transformers.
Start at :mod:`rlhfkit.models.attention.packed`; ``families.py`` tests a family on a tiny copy (``tiny_config.py``).
"""
