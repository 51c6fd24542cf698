"""Engines in Ray actors, whatever the engine: placement on devices, scheduling of requests, streams of groups.

May import: the ground of rollout, ``supervision/``, ``weight_sync/``, and Ray, when used.
Start at :mod:`rlhfkit.rollout.remote.scheduler`; ``placement.py`` says where engines run.
"""
