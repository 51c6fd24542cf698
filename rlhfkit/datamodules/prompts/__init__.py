"""Prompts of reinforcement learning, and the cursor that says which come next.

May import: ``rlhfkit.data``, ``protocols.py``, ``datamodules.sft`` and ``datamodules.tokenization``.
Start at :mod:`rlhfkit.datamodules.prompts.datamodule`.
"""
