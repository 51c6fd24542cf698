"""The engine in the training process: generation with Transformers, without Ray or a server.

May import: the ground of rollout (``engine.py``, ``errors.py``), models, data.
Start at :mod:`rlhfkit.rollout.local.engine`; ``generator.py`` is the decoding loop.
"""
