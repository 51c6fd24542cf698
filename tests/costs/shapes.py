"""Configurations of small models and runs that tests of costs share."""

from functools import cache
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.costs.run import EngineShape, Run, Sharding, find_gpu

SIZES: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
}


def build(config: Any) -> Any:
    """A real model of a configuration."""
    return AutoModelForCausalLM.from_config(config)


@cache
def llama_70b() -> ModelShape:
    """Llama 3.1 70B by its published sizes (2024, arXiv:2407.21783, table 3)."""
    return model_shape(
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
        )
    )


def grpo_70b(**changes: Any) -> Run:
    """GRPO of a 70B model on 256 GPUs with 16 engines of their own."""
    fields: dict[str, Any] = {
        "policy": llama_70b(),
        "gpu": find_gpu("H100"),
        "sharding": Sharding(ranks=256, stage=3),
        "engine": EngineShape(count=16, tensor_parallel=4),
        "gradient_checkpointing": True,
        "sequences": 16384,
        "group_size": 16,
        "prompt_tokens": 512.0,
        "answer_tokens": 4096.0,
        "max_answer_tokens": 16384,
    }
    fields |= changes
    tokens = fields["answer_tokens"] + fields["prompt_tokens"] / fields["group_size"]
    return Run(**({"tokens": fields["sequences"] * tokens} | fields))
