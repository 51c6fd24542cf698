"""``Decoding``: completions generated side by side, one token a step, from weights that may change between two steps.

A prompt that several rows share is computed once and its cache copied; finished rows leave the batch. Sampling inverts
the cumulative distribution at one uniform number per token, drawn from the sample's own seed: what a sample becomes
does not depend on its neighbours in the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhfkit.data.types import FinishReason, Prompt
from rlhfkit.rollout.engine import SamplingSpec, sample_seed
from rlhfkit.rollout.local.sampling import draw

Weights = Callable[[], AbstractContextManager[tuple[nn.Module, int]]]
"""Gives the model and its version; they do not change inside."""


class Completed(NamedTuple):
    """One row that has ended."""

    row: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason


class Decoding:
    """B rows, from their prompts to their ends.

    When the weights have changed since the last token, the cache of all that is running is computed anew from all its
    tokens: every token's log-prob is what a plain forward pass under the weights of that token's version says.

    Args:
        weights: What to compute with; asked for once a token.
        rows: Prompt and position in its group of each row.
        sampling: How to sample.
        iteration: Goes into each row's seed.
        stops: Tokens that end a row, besides the sampling's own.
        tokenizer: To look for stop texts.
        device: Of the model.
        cached: Keep keys and values between tokens; see :func:`~rlhfkit.rollout.local.caching.cache_problem`.
    """

    def __init__(
        self,
        weights: Weights,
        rows: Sequence[tuple[Prompt, int]],
        sampling: SamplingSpec,
        *,
        iteration: int,
        stops: Sequence[int],
        tokenizer: Any,
        device: torch.device | None,
        cached: bool = True,
    ) -> None:
        self._cached = cached
        self._weights = weights
        self._prompts = [prompt for prompt, _ in rows]
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._device = device
        shape = len(rows), sampling.max_new_tokens
        self._stops = torch.tensor(sorted({*stops, *sampling.stop_token_ids}), dtype=torch.int64, device=device)
        self._uniforms = _uniforms(rows, sampling, iteration).to(device)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._versions = torch.zeros(shape, dtype=torch.int64)
        self._ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self._alive = torch.arange(len(rows), device=device)  # rows in the batch; ended ones stay until a compaction
        self._mask = torch.empty(0)
        self._cache: Any = None
        self._version: int | None = None  # that the cache was computed with

    @torch.no_grad()
    def run(self) -> Iterator[list[Completed]]:
        """Decode; gives rows as they end. Closing it drops the others."""
        for step in range(self._sampling.max_new_tokens):
            logits, version = self._logits(step)
            ended = self._append(step, logits, version)
            if ended:
                yield ended
            if bool(self._ended.all()):
                return

    def _logits(self, step: int) -> tuple[Tensor, int]:
        """(B, V) logits of the next token of every row in the batch, and the version of the weights."""
        with self._weights() as (model, version):
            if not self._cached:
                return self._compute_without_cache(model, step), version
            if version != self._version:
                self._version = version
                return self._compute(model, step), version
            running = ~self._ended[self._alive]
            token = self._tokens[self._alive, step - 1]
            if int(running.sum()) <= 0.75 * len(running):  # a smaller batch pays for the copy of the cache
                kept = running.nonzero()[:, 0]
                self._cache.batch_select_indices(kept)
                self._alive, self._mask, token = self._alive[kept], self._mask[kept], token[kept]
            logits, self._mask = append_token(model, token, self._mask, self._cache)
            return logits, version

    def _compute(self, model: nn.Module, step: int) -> Tensor:
        """Everything so far in one pass, each distinct row once; fills cache and mask anew."""
        distinct, places = self._distinct(step)
        logits, mask, self._cache = begin_texts(model, distinct, self._device)
        self._mask = mask[places]
        self._cache.batch_select_indices(places)
        return logits[places]

    def _compute_without_cache(self, model: nn.Module, step: int) -> Tensor:
        """Everything so far in one pass, padded on the right as in training, each distinct row once."""
        distinct, places = self._distinct(step)
        ids = pad_sequence([torch.tensor(text) for text in distinct], batch_first=True).to(self._device)
        ends = torch.tensor([len(text) for text in distinct], device=self._device)
        mask = torch.arange(ids.shape[1], device=self._device) < ends[:, None]
        logits: Tensor = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[torch.arange(len(distinct), device=self._device), ends - 1][places]

    def _distinct(self, step: int) -> tuple[list[tuple[int, ...]], Tensor]:
        """The different texts of the rows that have not ended, and which of them each row has; the others leave."""
        self._alive = (~self._ended).nonzero()[:, 0]
        rows = self._alive.tolist()
        made = self._tokens[self._alive, :step].tolist()
        texts = [(*self._prompts[row].token_ids, *tokens) for row, tokens in zip(rows, made, strict=True)]
        distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        return list(distinct), torch.tensor([distinct[text] for text in texts], device=self._device)

    def _append(self, step: int, logits: Tensor, version: int) -> list[Completed]:
        """Draw a token for every row in the batch; gives the rows that have ended with it."""
        sampling, alive = self._sampling, self._alive
        forbidden = self._stops if step < sampling.min_new_tokens else None
        token, logprob = draw(logits, self._uniforms[alive, step], sampling, forbidden)
        self._tokens[alive, step], self._logprobs[alive, step] = token, logprob
        self._versions[:, step] = version
        stopped = torch.isin(token, self._stops)
        if sampling.stop and step + 1 >= sampling.min_new_tokens:
            texts = self._tokenizer.batch_decode(self._tokens[alive, : step + 1], skip_special_tokens=True)
            ends = [any(end in text for end in sampling.stop) for text in texts]
            stopped |= torch.tensor(ends, device=self._device)
        new = alive[stopped & ~self._ended[alive]]
        completed = [self._completed(row, step + 1, "stop") for row in new.tolist()]
        self._ended[new] = True
        if step + 1 == sampling.max_new_tokens:
            completed += [self._completed(row, step + 1, "length") for row in (~self._ended).nonzero()[:, 0].tolist()]
            self._ended[:] = True
        return completed

    def _completed(self, row: int, length: int, reason: FinishReason) -> Completed:
        parts = (self._tokens, self._logprobs, self._versions)
        tokens, logprobs, versions = (part[row, :length].tolist() for part in parts)
        return Completed(row, tokens, logprobs, versions, reason)


def begin_texts(model: Any, texts: Sequence[Sequence[int]], device: torch.device | None) -> tuple[Tensor, Tensor, Any]:
    """Texts of different lengths in one pass, padded on the left.

    Args:
        model: A Hugging Face causal language model.
        texts: B of them.
        device: Of the model.

    Returns:
        (B, V) logits of each text's next token, (B, T) int64 which tokens are no padding, and the filled cache.
    """
    length = max(map(len, texts))
    ids = torch.zeros(len(texts), length, dtype=torch.int64)
    mask = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, length - len(text) :] = torch.tensor(text)
        mask[row, length - len(text) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1], mask, out.past_key_values


def append_token(model: Any, token: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    """One more token of each text.

    Args:
        model: A Hugging Face causal language model.
        token: (B,) int64.
        mask: (B, T) int64, which tokens in the cache are no padding.
        cache: Of keys and values; the token's are added.

    Returns:
        (B, V) logits of the token after it, and the mask with it, (B, T+1).
    """
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    out = model(
        input_ids=token[:, None],
        attention_mask=mask,
        position_ids=mask.sum(1, keepdim=True) - 1,
        past_key_values=cache,
        use_cache=True,
    )
    return out.logits[:, -1], mask


def _uniforms(rows: Sequence[tuple[Prompt, int]], sampling: SamplingSpec, iteration: int) -> Tensor:
    """(B, max_new_tokens) float64: the randomness of every row, from its own seed."""
    drawn = []
    for prompt, index in rows:
        generator = torch.Generator().manual_seed(sample_seed(sampling.seed, iteration, prompt.index, index))
        drawn.append(torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(drawn)
