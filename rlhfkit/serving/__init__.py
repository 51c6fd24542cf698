"""HTTP servers with access control, and requests to servers: a token, limits of size and time.

Import the files one by one: ``access.py`` needs no web framework.

May import: ``validation.py``.
Start at :mod:`rlhfkit.serving.server`.
"""
