"""Several vLLM engines in Ray actors that look like one engine.

May import: all of rollout except ``local/``, and Ray and vLLM, when used.
Start at :mod:`rlhfkit.rollout.vllm.pool`; ``scheduler.py`` hands out requests, ``actor.py`` is one engine.
"""
