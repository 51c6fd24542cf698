"""Weights in blocks of bytes from training rank 0 to all workers: over gloo or NCCL.

May import: ``engine.py``, ``errors.py``, and ``sender.py`` and ``source.py`` of the folder above.
Start at :mod:`rlhfkit.rollout.weight_sync.process_group.transfer`. Only ``groups.py`` knows what sets the backends
apart.
"""
