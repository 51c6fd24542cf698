"""Engines over HTTP: running ``vllm serve`` processes, which a run neither starts nor ends.

May import: the other files of rollout, serving.
Start at :mod:`rlhfkit.rollout.server.engine`.
"""
