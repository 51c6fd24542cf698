"""Learning from comparisons of answers that are sampled during training: online DPO, XPO, and Nash-MD.

May import: the files of ``modules/``, models, data, losses, and ``rollout/`` to check which engine samples.
Start at :mod:`rlhfkit.modules.on_policy.online_preference.online_dpo`; ``base.py`` has what all share.
"""
