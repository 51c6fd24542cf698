"""Prompts of reinforcement learning, and the cursor that says which come next.

May import: ``datamodules.sft``, ``datamodules.tokenization``, data.
Start at :mod:`rlhfkit.datamodules.prompts.datamodule`.
"""
