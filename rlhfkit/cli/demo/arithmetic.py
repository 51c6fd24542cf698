"""A task small enough for two CPU cores: additions, a character tokenizer, and a model of 345,000 parameters.

:func:`make` writes

- ``model/``: a randomly initialised Llama and its tokenizer, loadable with ``from_pretrained``;
- ``demonstrations.jsonl``: ``{"question": "17+25=", "answer": "42"}``, for supervised fine-tuning, and
  ``validation.jsonl``, 200 more for early stopping;
- ``train.jsonl`` and ``heldout.jsonl``: prompts for reinforcement learning, and 300 that are never trained on.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LARGEST = 49
"""Summands are 0 .. 49: 2,500 questions."""
HELD_OUT, VALIDATION = 300, 200


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of an addition, and an end-of-sequence token."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=64
    )


def save_model(folder: Path, seed: int) -> None:
    """Write a randomly initialised model and its tokenizer."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_questions(folder: Path, seed: int) -> None:
    """Write all additions, shuffled and split into training and held-out files."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    for name, lines in {
        "heldout.jsonl": rows[:HELD_OUT],
        "validation.jsonl": rows[HELD_OUT : HELD_OUT + VALIDATION],
        "demonstrations.jsonl": rows[HELD_OUT + VALIDATION :],
        "train.jsonl": rows[HELD_OUT:],
    }.items():
        (folder / name).write_text("\n".join(lines) + "\n")


def make(folder: Path, seed: int = 0) -> Path:
    """Write model and data into a folder, which is returned; the seed is that of the weights and of the split."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", seed)
    save_questions(folder, seed)
    return folder
