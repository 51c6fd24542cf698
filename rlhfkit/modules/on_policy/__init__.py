"""Learning from the policy's own samples: GRPO, PPO, on-policy distillation and their presets.

May import: modules' own ground, the teacher of ``supervised/``, models, data, losses; engines and rewards stay outside.
Start at :mod:`rlhfkit.modules.on_policy.base` (``prepare``, ``loss``, ``training_step``), then ``grpo.py``.
"""
