"""Supervised records beyond plain examples: preference pairs, labelled answers, judged steps, teacher's tokens.

May import: torch and the rest of data.
Start at :mod:`rlhfkit.data.formats.preferences`.
"""
