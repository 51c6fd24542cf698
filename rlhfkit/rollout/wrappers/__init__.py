"""Engines around other engines: their base, and groups of which a part is another sampler's than the policy.

May import: the ground of rollout (``engine.py``, ``errors.py``), ``local/``, models, data.
Start at :mod:`rlhfkit.rollout.wrappers.engine_wrapper`.
"""
