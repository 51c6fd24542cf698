"""Training of reward models on pairs (Bradley-Terry) and of process reward models on steps.

May import: the files of ``modules/``, models, data, losses.
Start at :mod:`rlhfkit.modules.reward.reward_model`; ``base.py`` has what both share.
"""
