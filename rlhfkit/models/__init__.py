"""Hugging Face models: loading, packed attention, and one forward pass that gives log-probs."""

from rlhfkit.models.forward import PolicyOutput, policy_output, unwrap
from rlhfkit.models.load import load_causal_lm, load_tokenizer

__all__ = ["PolicyOutput", "load_causal_lm", "load_tokenizer", "policy_output", "unwrap"]
