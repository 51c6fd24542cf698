"""The policy's weights into engines: gathered from any strategy, sent in buckets by gloo, NCCL or IPC.

May import: the ground of rollout (``engine.py``, ``errors.py``), models, ``distributed.py``.
Start at :mod:`rlhfkit.rollout.weight_sync.source` (what is sent), then ``coordinator.py`` (which way, in which steps)
and ``process_group/`` (over gloo and NCCL).
"""
