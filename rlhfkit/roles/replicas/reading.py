"""What a reward model with a tokenizer of its own reads: prompts and answers as text, in its own dialogue format."""

import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhfkit.models import load_tokenizer

READS = ("tokens", "text", "chat")
"""The policy's token ids; prompt and answer as one text; or as two turns in the model's own chat template."""


class TextReading:
    """Writes sequences of the policy as texts, and reads them with a reward model's tokenizer.

    Args:
        reads: ``text``, ``chat``, or the dotted name of a function of prompt and answer that returns the text.
        policy: Folder or hub name of the policy, for its tokenizer, or a tokenizer.
        model: Folder or hub name of the reward model, likewise.
        trust_remote_code: Run Python code that comes with them.
    """

    def __init__(self, reads: str, policy: Any, model: str, trust_remote_code: bool) -> None:
        self._reads = reads
        named = isinstance(policy, str)
        self._policy = load_tokenizer(policy, trust_remote_code=trust_remote_code) if named else policy
        self._own = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._write: Callable[[str, str], str] | None = None if reads in READS else pkgutil.resolve_name(reads)

    def read(self, input_ids: Tensor, lengths: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, T') int64 and lengths (B,) of B sequences, whose answers begin at the first token of ``mask``.

        ``input_ids`` are (B, T), ``mask`` (B, T-1).
        """
        rows = []
        for ids, length, chosen in zip(input_ids.tolist(), lengths.tolist(), mask, strict=True):
            begin = int(chosen.long().argmax()) + 1 if bool(chosen.any()) else length
            tokens = self._tokens(self._text(ids[:begin]), self._text(ids[begin:length]))
            rows.append(tokens or [0])  # control tokens only, as a placeholder may have: no text, and a model needs one
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return padded, torch.tensor([len(row) for row in rows])

    def _text(self, ids: list[int]) -> str:
        return str(self._policy.decode(ids, skip_special_tokens=True))

    def _tokens(self, prompt: str, answer: str) -> list[int]:
        if self._reads == "chat":
            turns: list[dict[str, Any]] = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
            text = self._own.apply_chat_template(turns, tokenize=False)
            return list(self._own(text, add_special_tokens=False)["input_ids"])
        text = prompt + answer if self._write is None else self._write(prompt, answer)
        return list(self._own(text)["input_ids"])
