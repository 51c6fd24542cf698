"""Tiny random language models with a tokenizer, for tests that need a model folder and no network."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from rlhfkit.data.types import Prompt, Sample

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")


def local_engine(folder: str | Path, model: Any = None, *, version: int = 0, **arguments: Any) -> Any:
    """A ``LocalEngine`` that serves a model's weights, or those in the folder."""
    from rlhfkit.rollout import LocalEngine, ModuleWeights

    engine = LocalEngine(**arguments)
    engine.start(str(folder), dtype=torch.float32, load_weights=model is None)
    if model is not None:
        engine.load(ModuleWeights(model), version)
    return engine


def prompts_of(texts: Sequence[str], answers: Sequence[Any] | None = None) -> list[Prompt]:
    """Prompts for the tiny tokenizer."""
    ids = map(tiny_tokenizer().encode, texts)
    answers = [None] * len(texts) if answers is None else answers
    return [
        Prompt(index, tokens, text, answer=answer)
        for index, (text, tokens, answer) in enumerate(zip(texts, ids, answers, strict=True))
    ]


def token_logprobs(model: Any, tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """(T-1,) log-probs of all tokens but the first, by the definition; float64 of a model in float64, else float32."""
    ids = torch.tensor([[*tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def completion_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """(T,) those of a sample's completion."""
    return token_logprobs(model, sample.all_token_ids.tolist(), temperature)[sample.prompt.num_tokens - 1 :]


def tiny_tokenizer(**extra: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character and newline; 99 tokens, pad and eos among them.

    And those of ``extra``, such as of images, by the names that processors know them by.
    """
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": extra} if extra else {}),
    )


ROLES = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
"""A chat template: ``<u>1+1;<a>2;``."""


def chat_tokenizer(template: str = ROLES) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(path: str | Path, *, tied: bool = True, seed: int = 0, context: int = 512, key_heads: int = 1) -> Path:
    """Save a two-layer Llama (hidden 64, fp32, random) and its tokenizer in a folder that any engine can load.

    Args:
        path: Folder, made when missing.
        tied: Whether the output layer shares the embedding's weights.
        seed: Of the random weights.
        context: Tokens the model can see.
        key_heads: Of each layer, 1 or 2; tensor ranks divide them.

    Returns:
        The folder.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = context
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 each: vLLM's CPU attention has no smaller ones
        num_key_value_heads=key_heads,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # Five times the usual spread, so that a random model has preferences and greedy choices have no ties.
        initializer_range=0.1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_mixture(path: str | Path) -> Path:
    """Write a mixture of four experts, two of which each token goes to, with its tokenizer to a folder."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
    )
    MixtralForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return Path(path)
