"""Learning from the policy's own samples: GRPO, PPO, on-policy distillation and their presets.

May import: the files of ``modules/``, models, data, losses; no engines or rewards.
Start at :class:`rlhfkit.modules.on_policy.base.OnPolicyModule` and its ``prepare()``, then read ``grpo.py``.
"""
