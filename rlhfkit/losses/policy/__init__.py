"""Policy losses, all with one signature: PPO, GRPO and their variants, losses on whole sequences, REINFORCE.

May import: torch and the files of losses above this folder.
Start at :mod:`rlhfkit.losses.policy.ppo`; ``base.py`` holds what they share and shows how to write one.
"""
