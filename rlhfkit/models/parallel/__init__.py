"""Forward passes that the ranks of a forward group compute together: each some of the tokens, or of the weights.

May import: losses, data, ``mesh.py``, ``distributed.py`` and ``rlhfkit.models.attention``.
Start at :mod:`rlhfkit.models.parallel.joined_rows`.
"""
