"""Policy losses, all with one signature: the clipped ones, those of whole sequences, other trust regions, REINFORCE.

May import: torch and the ground of losses.
Start at :mod:`rlhfkit.losses.policy.ppo`; what all of them share is in ``base.py``.
"""
