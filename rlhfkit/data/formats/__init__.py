"""Supervised records beyond plain examples: preference pairs, labelled answers, judged steps, a teacher's tokens.

May import: torch and the files of data above this folder, and its loaders.
Start at :mod:`rlhfkit.data.formats.preferences`.
"""
