"""Hugging Face models and tokenizers by name, the way every module loads them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhfkit.models.attention import PACKED_ATTENTION, register_packed_attention, supports_packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}


def precision_dtype(precision: str, *, compute: bool = False) -> torch.dtype:
    """The type of weights (or of the arithmetic) under a Lightning precision.

    Args:
        precision: ``Trainer.precision``: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"`` ...
        compute: The type that matrix products run in, which for ``-mixed`` differs from that of the weights.

    Returns:
        E.g. ``torch.float32`` for the weights of ``bf16-mixed``, ``torch.bfloat16`` for its arithmetic.

    Raises:
        ValueError: If the precision is none of Lightning's.
    """
    kind, _, style = str(precision).partition("-")
    if kind not in _DTYPES:
        raise ValueError(f"precision must start with one of {', '.join(_DTYPES)}, got {precision!r}")
    return _DTYPES[kind] if style != "mixed" or compute else torch.float32


def existing_name(name: str) -> str:
    """Reject a path that does not exist before the hub client turns it into a confusing message about repositories."""
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(
            f"there is no model folder {name!r}; give a folder written by save_pretrained or a hub name"
        )
    return str(Path(name).expanduser()) if looks_like_path else name


def load_causal_lm(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
) -> "PreTrainedModel":
    """Load a causal language model for training.

    Args:
        name: Folder or hub name.
        dtype: Type of the weights.
        attention: Transformers' ``attn_implementation``; ``None``: our packed attention where the model allows it.
        gradient_checkpointing: Recompute activations in the backward pass.
        trust_remote_code: Run Python code that comes with the model. Off unless asked.

    Returns:
        The model, in training mode.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name = existing_name(name)
    register_packed_attention()
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    if attention is None and supports_packing(config):
        attention = PACKED_ATTENTION
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def disable_dropout(model: nn.Module) -> None:
    """Switch all dropout of a model off for good, in training mode too.

    Args:
        model: Changed in place: ``Dropout`` layers, and probabilities that attention layers hold as plain numbers.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "activation_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer and give it a padding token if it has none (the end-of-sequence token, as peers do).

    Args:
        name: Folder or hub name.
        trust_remote_code: Run Python code that comes with the tokenizer. Off unless asked.

    Raises:
        FileNotFoundError: If ``name`` is a path and no folder.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(existing_name(name), trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(name: str, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Tokens that end a completion: the generation configuration's end-of-sequence tokens and the tokenizer's.

    Args:
        name: Folder or hub name of the model.
        tokenizer: Its tokenizer.
        trust_remote_code: Passed to Transformers.
    """
    from transformers import AutoConfig, GenerationConfig

    found: set[int] = set()
    try:
        configured: Any = GenerationConfig.from_pretrained(name, trust_remote_code=trust_remote_code).eos_token_id
    except OSError:  # the folder has no generation_config.json
        configured = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).eos_token_id
    for token in [configured, tokenizer.eos_token_id]:
        found.update(token if isinstance(token, list) else [] if token is None else [token])
    return tuple(sorted(found))
