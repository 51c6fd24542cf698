"""Rewards over HTTP: the client that training uses, and the server of ``rlhfkit serve-reward``.

May import: ``base.py`` of rewards, serving, data, ``validation.py``.
Start at :mod:`rlhfkit.rewards.remote.reward` (client) or ``server.py``; ``wire.py`` is the format between them.
"""
