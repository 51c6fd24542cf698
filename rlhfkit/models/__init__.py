"""Hugging Face models: loading, LoRA, packed attention, and one forward pass that gives log-probs or values.

May import: losses, data, ``mesh.py``, ``distributed.py``, and Transformers and peft when used.
Start at :mod:`rlhfkit.models.load` and :mod:`rlhfkit.models.forward`.
"""

from rlhfkit.models.forward import PolicyOutput, policy_output
from rlhfkit.models.heads import ScalarModel, load_scalar_model, reward_output, scalar_output
from rlhfkit.models.load import ModelLoading, load_causal_lm, load_tokenizer
from rlhfkit.models.lora import LoRA, adapter_disabled

__all__ = [
    "LoRA",
    "ModelLoading",
    "PolicyOutput",
    "ScalarModel",
    "adapter_disabled",
    "load_causal_lm",
    "load_scalar_model",
    "load_tokenizer",
    "policy_output",
    "reward_output",
    "scalar_output",
]
