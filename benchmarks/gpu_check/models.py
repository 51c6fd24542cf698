"""Language models with random weights, made here: tiny ones with a tokenizer in a folder, large ones on the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
FAMILIES = ("llama", "mistral")
"""Kinds of :func:`tiny_config`: full attention with grouped keys, and a sliding window."""
WINDOW = 16
"""Of ``mistral``."""


def tiny_config(family: str = "llama", *, hidden: int = 64, heads: int = 2, layers: int = 2) -> Any:
    """Configuration of a model with two query heads per key head, of 32 numbers each."""
    from transformers import LlamaConfig, MistralConfig

    kind, more = (MistralConfig, {"sliding_window": WINDOW}) if family == "mistral" else (LlamaConfig, {})
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.1,  # five times the usual spread, so that a random model has preferences
        **more,
    )


def tiny_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """Save a tiny model with a tokenizer of one token per printable character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).save_pretrained(folder)
    return folder


def build(config: Any, device: str, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """A model with random weights, made on the device; ``attention`` as in ``load_causal_lm``, ``None``: packed."""
    from transformers import AutoModelForCausalLM

    from rlhfkit.models.attention.families import use_packed_attention

    torch.manual_seed(0)
    own = attention if attention in ("sdpa", "eager") else "sdpa"
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=own)
    if own != attention:
        use_packed_attention(model, attention)
    return model


def large_config(size: str) -> Any:
    """Qwen2.5's shapes: ``0.5B`` and ``7B``; ``tiny`` for a CPU."""
    from transformers import Qwen2Config

    shapes = {  # hidden, feed-forward, layers, heads, key heads, vocabulary, tied
        "tiny": (64, 128, 2, 4, 2, 512, True),
        "0.5B": (896, 4864, 24, 14, 2, 151936, True),
        "7B": (3584, 18944, 28, 28, 4, 152064, False),
    }
    hidden, feed_forward, layers, heads, key_heads, vocabulary, tied = shapes[size]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


class Rows:
    """Sequences padded on the right, as a forward pass of the policy reads them."""

    def __init__(self, sequences: Sequence[Sequence[int]], device: str = "cpu") -> None:
        longest = max(map(len, sequences))
        self.input_ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences], device=device)
        lengths = torch.tensor([len(ids) for ids in sequences], device=device)
        self.attention_mask = torch.arange(longest, device=device) < lengths[:, None]

    @property
    def mask(self) -> Tensor:
        """(B, T-1) bool, all tokens but the first of each sequence."""
        return self.attention_mask[:, 1:]


def random_sequences(lengths: Sequence[int], *, shared: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Random token ids; with ``shared``, sequences 2i and 2i + 1 begin with that many tokens of their own."""
    generator = torch.Generator().manual_seed(len(lengths) + shared)
    made = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    for first, second in zip(made[::2], made[1::2], strict=False):
        second[: min(shared, len(second))] = first[: min(shared, len(second))]
    return made
