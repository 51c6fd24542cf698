"""vLLM engines in Ray actors.

May import: ``supervision/``, ``weight_sync/`` and the ground of rollout, and Ray and vLLM, when used.
Start at :mod:`rlhfkit.rollout.vllm.pool`; ``actor.py`` is one engine, ``placement.py`` says where,
``plugin.py`` runs inside vLLM's workers.
"""
