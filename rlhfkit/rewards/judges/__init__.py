"""Judges, which compare two answers to a prompt, and the reward that makes numbers of their judgements.

May import: the files of ``rewards/``, data, serving, ``validation.py``.
Start at :mod:`rlhfkit.rewards.judges.pairwise`; ``chat.py`` asks a language model.
"""
