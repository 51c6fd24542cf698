"""HTTP servers that refuse requests without a token. Import its modules one by one: the token needs no web framework.

May import: ``validation.py``.
Start at :mod:`rlhfkit.serving.server`.
"""
