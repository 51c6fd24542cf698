"""Rewards by HTTP: the client that training uses, and the server behind ``rlhfkit serve-reward``.

May import: the ground of rewards (``base.py``, ``failures.py``), ``serving``, data.
Start at :mod:`rlhfkit.rewards.remote.reward` (client) or ``server.py``; ``wire.py`` is what they write to each other.
"""
