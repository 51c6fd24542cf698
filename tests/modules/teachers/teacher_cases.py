"""Tokenizers of several kinds, models with their tokens, and samples of a student, for teachers with other tokens."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhfkit import Experience
from rlhfkit.data.batch import TokenBatch, TokenExample, collate_tokens


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: one token for each byte, and for some pairs of them; other characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("1", "2"), ("3", "4"), ("4", "5"), ("6", "+"), ("Ġ", "a"), ("a", "b"), ("a", "a")]
    tokens = ["<pad>", "<end>", *alphabet, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Printable characters and all pairs of digits."""
    characters = [chr(code) for code in range(126, 31, -1)] + ["\n"]
    pairs = [(first, second) for first in "0123456789" for second in "0123456789"]
    tokens = ["<end>", *map("".join, pairs), *characters, "<pad>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    )


def model_with(tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int = 5) -> Path:
    """A tiny random model with the tokens of a tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Like SentencePiece's of Llama 2: a space before every text, which decoding leaves out; other bytes as tokens."""
    words = ["▁He", "llo", "▁the", "re", "▁", *"Helothra125!"]
    tokens = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scored = [(token, 3.0 * len(token) - len(tokens)) for token in tokens]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with ``<user>`` and ``<turn>`` in a template, whose turns end with another token than texts."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<user>", "<turn>")], special_tokens=True)
    tokenizer.chat_template = (
        "{% for turn in messages %}{% if turn.role == 'user' %}<user>{% elif turn.role == 'system' %}<user>!{% endif %}"
        "{{ turn.content }}<turn>{% endfor %}"
    )
    return tokenizer


def samples(rows: list[tuple[str, str]]) -> Experience:
    """Prompts and answers of the student that end with its end of sequence."""
    student = tiny_tokenizer()
    ids = [
        student(prompt)["input_ids"] + student(answer)["input_ids"] + [student.eos_token_id] for prompt, answer in rows
    ]
    input_ids = torch.zeros(len(rows), max(map(len, ids)), dtype=torch.int64)
    mask = torch.zeros(len(rows), input_ids.shape[1] - 1, dtype=torch.bool)
    for row, (tokens, (prompt, _)) in enumerate(zip(ids, rows, strict=True)):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(prompt) - 1 : len(tokens) - 1] = True
    lengths, index = torch.tensor([*map(len, ids)]), torch.arange(len(rows))
    return Experience(
        input_ids=input_ids,
        attention_mask=torch.arange(input_ids.shape[1]) < lengths[:, None],
        action_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        versions=torch.zeros(mask.shape, dtype=torch.int64),
        rewards=torch.zeros(len(rows)),
        group=index,
        sample_index=torch.zeros_like(index),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        update=torch.zeros_like(index),
    )


def batch_of(rows: list[tuple[str, str]], tokenizer: Any) -> TokenBatch:
    """Prompts and answers, of which the answers and their end are learned."""
    examples = []
    for prompt, answer in rows:
        first, second = tokenizer(prompt)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        examples.append(TokenExample(first + second, [False] * len(first) + [True] * len(second)))
    return collate_tokens(examples)
