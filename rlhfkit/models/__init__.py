"""Hugging Face models: loading, packed attention, and one forward pass that gives log-probs."""

from rlhfkit.models.forward import PolicyOutput, policy_output, unwrap
from rlhfkit.models.heads import ScalarModel, load_scalar_model, reward_output, scalar_output
from rlhfkit.models.load import load_causal_lm, load_tokenizer
from rlhfkit.models.lora import LoRA, adapter_disabled, has_adapter

__all__ = [
    "LoRA",
    "PolicyOutput",
    "ScalarModel",
    "adapter_disabled",
    "has_adapter",
    "load_causal_lm",
    "load_scalar_model",
    "load_tokenizer",
    "policy_output",
    "reward_output",
    "scalar_output",
    "unwrap",
]
