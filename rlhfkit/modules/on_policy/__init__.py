"""Learning from the policy's own samples: GRPO, PPO, on-policy distillation and their presets.

May import the files of ``modules/`` above it and ``supervised/teacher.py``, models, data and losses. Start at
:meth:`rlhfkit.modules.on_policy.base.OnPolicyModule.prepare`, then read ``grpo.py``.
"""
