"""Models that judge: reward models on pairs (Bradley-Terry), process reward models on steps.

May import: modules' own ground (``base.py``, ``functions.py`` ...), models, data, losses.
Start at :mod:`rlhfkit.modules.reward.reward_model`; ``base.py`` holds what both share.
"""
