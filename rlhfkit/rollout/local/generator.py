"""``Decoding``: generates a batch of completions, one token per step, from weights that may change between two steps.

A prompt that several rows share is computed once and its cache copied; finished rows leave the batch. Sampling inverts
the cumulative distribution at one uniform number per token, from the sample's own seed, so that a sample does not
depend on the other rows of its batch. A row may continue a sample that was begun earlier.

The host waits for the device once per token, for the tokens and their log-probs: which rows have ended, and all other
bookkeeping, is in its own memory. Transformers waits once more to look for padding in an attention mask that it is
given, so :func:`decode_step` gives it none, or a finished one, where the family takes them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, sample_seed

if TYPE_CHECKING:
    from rlhfkit.models.vision import VisionProcessor

Weights = Callable[[], AbstractContextManager[tuple[nn.Module, int]]]
"""A context in which the model and its version, which it gives, do not change."""


class FinishedRow(NamedTuple):
    """A finished completion of T tokens, or (``finish_reason`` ``"abort"``) what was made of one."""

    row: int
    token_ids: Tensor
    """(T,) int64."""
    logprobs: Tensor
    """(T,) float32."""
    versions: Tensor
    """(T,) int64."""
    finish_reason: FinishReason


class Decoding:
    """Generates B completions.

    If the weights have changed since the last token, the cache of all running rows is computed again from their tokens,
    so that every token's log-prob is that of a plain forward pass with the weights of the token's version.

    Args:
        weights: The model; entered once per token.
        rows: Prompt and position in its group, of each row.
        begun: The sample that each row continues, or ``None``; empty: none continues any.
        sampling: How to sample.
        iteration: Goes into each row's seed.
        stops: Tokens that end a completion, besides those of ``sampling``.
        tokenizer: To find stop texts.
        device: Of the model.
        cached: Whether to cache keys and values; see :func:`~rlhfkit.models.attention.families.cache_problem`.
        finished_masks: Whether the family takes finished attention masks; see
            :func:`~rlhfkit.models.attention.families.takes_finished_masks`.
        vision: The processor of a model that sees images; ``None``: it reads text only.
    """

    def __init__(
        self,
        weights: Weights,
        rows: Sequence[tuple[Prompt, int]],
        sampling: SamplingSpec,
        *,
        begun: Sequence[Sample | None] = (),
        iteration: int,
        stops: Sequence[int],
        tokenizer: Any,
        device: torch.device | None,
        cached: bool = True,
        finished_masks: bool = False,
        vision: "VisionProcessor | None" = None,
    ) -> None:
        self._cached = cached
        self._vision = vision
        self._never = None if vision is None else torch.tensor([vision.token_id], device=device)
        self._finished_masks = finished_masks
        self._weights = weights
        self._prompts = [prompt for prompt, _ in rows]
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._device = device
        shape = len(rows), sampling.max_new_tokens
        self._stops = torch.tensor(sorted({*stops, *sampling.stop_token_ids}), dtype=torch.int64)
        self._forbidden = self._stops.to(device) if sampling.min_new_tokens else None
        self._shift: Tensor | None = None  # of positions behind images, by row in the batch; None: none has any
        # What rows continue: its tokens, log-probs and versions, and how many there are.
        self._begun = {row: sample for row, sample in enumerate(begun) if sample is not None}
        self._before = torch.tensor(
            [self._begun[row].num_tokens if row in self._begun else 0 for row in range(shape[0])]
        )
        uniforms = _uniforms(rows, sampling, iteration)
        for row, sample in self._begun.items():  # each token of a sample has its own
            uniforms[row] = uniforms[row].roll(-sample.num_tokens)
        self._all_uniforms = uniforms.to(device)
        # In the host's memory: what was made so far.
        self._steps = 0
        self._tokens = torch.zeros(shape, dtype=torch.int64)
        self._logprobs = torch.zeros(shape)
        self._versions = torch.zeros(shape, dtype=torch.int64)
        self._ended = torch.zeros(len(rows), dtype=torch.bool)
        self._alive = torch.arange(len(rows))  # rows in the batch; finished ones leave it late
        # On the device: what the next token is computed from, for the rows in the batch.
        self._uniforms = self._all_uniforms
        self._last = torch.empty(0)
        self._mask = torch.empty(0)
        self._cache: Any = None
        self._padding = torch.empty(0)  # of each row's text in the cache, on the host
        self._version: int | None = None  # with which the cache was computed
        self._penalties: Penalties | None = None

    @torch.no_grad()
    def run(self) -> Iterator[list[FinishedRow]]:
        """Generate; yields the rows that each token finished, which may be none."""
        for step in range(self._sampling.max_new_tokens):
            logits, version = self._logits(step)
            ended = self._append(step, logits, version)
            self._steps = step + 1
            yield ended
            if self._ended.all():
                return

    def cut(self) -> list[FinishedRow]:
        """Return what was made so far of the rows that are not finished."""
        return [self._finish(row, self._steps, "abort") for row in (~self._ended).nonzero()[:, 0].tolist()]

    def _logits(self, step: int) -> tuple[Tensor, int]:
        """(B, V) logits of the next token of every row in the batch, and the version of the weights."""
        with self._weights() as (model, version):
            if not self._cached:
                return self._compute_without_cache(model, step), version
            if version != self._version:
                self._version = version
                return self._compute(model, step), version
            running = ~self._ended[self._alive]
            if running.sum() <= 0.75 * len(running):  # a smaller batch pays for the copy of the cache
                self._keep(running.nonzero()[:, 0])
            masks = self._finished_masks
            logits, self._mask = decode_step(
                model,
                self._last,
                self._mask,
                self._cache,
                padded=bool(self._padding.any()) if masks else None,
                shift=self._shift,
            )
            return logits, version

    def _keep(self, kept: Tensor) -> None:
        """Remove all rows but these from the batch."""
        self._alive, self._padding = self._alive[kept], self._padding[kept]
        kept = kept.to(self._device)
        self._cache.batch_select_indices(kept)
        self._mask, self._last, self._uniforms = self._mask[kept], self._last[kept], self._uniforms[kept]
        self._shift = None if self._shift is None else self._shift[kept]

    def _compute(self, model: nn.Module, step: int) -> Tensor:
        """Compute all tokens so far in one pass, each distinct row once, and fill the cache."""
        distinct, places, images = self._distinct(step)
        lengths = torch.tensor([len(text) for text in distinct])
        self._padding = (lengths.max() - lengths)[places]
        seen = None if self._vision is None else self._vision.prompts(images)
        logits, mask, self._cache = prefill(model, distinct, self._device, seen)
        places = places.to(self._device)
        self._shift = None if seen is None or seen.shift is None else seen.shift[places]
        self._mask = mask[places]
        self._cache.batch_select_indices(places)
        return logits[places]

    def _compute_without_cache(self, model: nn.Module, step: int) -> Tensor:
        """Compute all tokens so far in one pass, padded on the right as in training, each distinct row once."""
        distinct, places, images = self._distinct(step)
        ids = pad_sequence([torch.tensor(text) for text in distinct], batch_first=True).to(self._device)
        ends = torch.tensor([len(text) for text in distinct])
        mask = (torch.arange(ids.shape[1]) < ends[:, None]).long().to(self._device)
        seen = {} if self._vision is None else self._vision.prompts(images).arguments(model, ids, mask)
        logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **seen).logits
        return logits[places.to(self._device), (ends[places] - 1).to(self._device)]

    def _distinct(self, step: int) -> tuple[list[tuple[int, ...]], Tensor, list[tuple[Any, ...]]]:
        """Remove finished rows; return the distinct texts of the others, the index of each row's, and their images.

        Equal tokens with other images are other texts.
        """
        self._alive = (~self._ended).nonzero()[:, 0]
        self._uniforms = self._all_uniforms[self._alive.to(self._device)]
        rows = self._alive.tolist()
        made = self._completions(self._alive, step)
        texts = [
            ((*self._prompts[row].token_ids.tolist(), *tokens), self._prompts[row].attachments)
            for row, tokens in zip(rows, made, strict=True)
        ]
        distinct = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        places = torch.tensor([distinct[text] for text in texts])
        return [tokens for tokens, _ in distinct], places, [images for _, images in distinct]

    def _completions(self, rows: Tensor, steps: int) -> list[list[int]]:
        made = self._tokens[rows, :steps].tolist()
        begun = (self._begun.get(row) for row in rows.tolist())
        return [new if old is None else [*old.token_ids.tolist(), *new] for old, new in zip(begun, made, strict=True)]

    def _penalized(self, logits: Tensor, short: Tensor) -> Tensor | None:
        """(B, V) the logits to sample from, where they differ: by penalties, or by tokens that some rows must not have.

        ``short``: (B,) bool, on the host, which rows may not end yet. Where it is the same in all, ``sample_tokens``
        is told instead.
        """
        penalized = None
        if self._sampling.penalizes:
            if self._penalties is None:
                self._penalties = Penalties(self._prompts, self._sampling, logits)
                for row, sample in self._begun.items():
                    self._penalties.count(row, sample.token_ids.tolist())
            penalized = self._penalties.apply(logits, self._alive.to(self._device))
        if self._forbidden is not None and bool(short.any()) and not bool(short.all()):
            penalized = logits.float() if penalized is None else penalized
            without_stops = penalized.index_fill(-1, self._forbidden, -torch.inf)
            penalized = torch.where(short.to(self._device)[:, None], without_stops, penalized)
        return penalized

    def _append(self, step: int, logits: Tensor, version: int) -> list[FinishedRow]:
        """Sample a token for every row in the batch; returns the rows that are finished with it."""
        sampling, alive, before = self._sampling, self._alive, self._before[self._alive]
        short = before + step < sampling.min_new_tokens
        forbidden = self._never
        if self._forbidden is not None and bool(short.all()):
            forbidden = self._forbidden if forbidden is None else torch.cat([self._forbidden, forbidden])
        penalized = self._penalized(logits, short)
        self._last, logprob = sample_tokens(logits, self._uniforms[:, step], sampling, forbidden, penalized)
        if self._penalties is not None:
            self._penalties.add(alive.to(self._device), self._last)
        # Both in one copy, the only thing that the host waits for. Token ids are exact in float64.
        made = torch.stack([self._last.double(), logprob.double()]).cpu()
        token = made[0].long()
        self._tokens[alive, step], self._logprobs[alive, step] = token, made[1].float()
        self._versions[:, step] = version
        stopped = torch.isin(token, self._stops)
        if sampling.stop:
            texts = self._tokenizer.batch_decode(self._completions(alive, step + 1), skip_special_tokens=True)
            ends = [any(end in text for end in sampling.stop) for text in texts]
            stopped |= torch.tensor(ends) & (before + step + 1 >= sampling.min_new_tokens)
        new = alive[stopped & ~self._ended[alive]]
        completed = [self._finish(row, step + 1, "stop") for row in new.tolist()]
        self._ended[new] = True
        full = alive[(before + step + 1 == sampling.max_new_tokens) & ~self._ended[alive]]
        completed += [self._finish(row, step + 1, "length") for row in full.tolist()]
        self._ended[full] = True
        return completed

    def _finish(self, row: int, length: int, reason: FinishReason) -> FinishedRow:
        parts = (self._tokens, self._logprobs, self._versions)
        tokens, logprobs, versions = (part[row, :length].clone() for part in parts)
        if row in self._begun:
            sample = self._begun[row]
            tokens = torch.cat([torch.tensor(sample.token_ids, dtype=torch.int64), tokens])
            logprobs = torch.cat([torch.tensor(sample.logprobs, dtype=torch.float32), logprobs])
            versions = torch.cat([torch.tensor(sample.versions, dtype=torch.int64), versions])
        return FinishedRow(row, tokens, logprobs, versions, reason)


def prefill(
    model: Any, texts: Sequence[Sequence[int]], device: torch.device | None, images: Any = None
) -> tuple[Tensor, Tensor, Any]:
    """Compute texts of different lengths in one pass, padded on the left.

    Args:
        model: A Hugging Face causal language model.
        texts: Token ids of B texts.
        device: Of the model.
        images: Those of the texts, as ``VisionProcessor.prompts`` gives them; ``None``: texts only.

    Returns:
        (B, V) logits of each text's next token, (B, T) int64 attention mask, and the filled cache.
    """
    length = max(map(len, texts))
    ids = torch.zeros(len(texts), length, dtype=torch.int64)
    mask = torch.zeros(len(texts), length, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, length - len(text) :] = torch.tensor(text)
        mask[row, length - len(text) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    arguments = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    if images is not None:
        arguments |= images.arguments(model, ids, mask)
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **arguments)
    return out.logits[:, -1], mask, out.past_key_values


def decode_step(
    model: Any, token: Tensor, mask: Tensor, cache: Any, *, padded: bool | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute one more token of each text.

    Args:
        model: A Hugging Face causal language model.
        token: (B,) int64.
        mask: (B, T) int64 attention mask of the cached tokens.
        cache: Of keys and values; extended in place.
        padded: Whether the mask has zeros, for a family that takes finished masks: none if there are no zeros, else
            (B, 1, 1, T+1) bool. ``None``: Transformers is given the mask as it is and looks for itself.
        shift: (B, 1) int64, added to positions, which are numbers of tokens otherwise.

    Returns:
        (B, V) logits of the next token, and the (B, T+1) mask.
    """
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    positions = mask.sum(1, keepdim=True) - 1
    out = model(
        input_ids=token[:, None],
        attention_mask=mask if padded is None else mask.bool()[:, None, None] if padded else None,
        position_ids=positions if shift is None else positions + shift,
        past_key_values=cache,
        use_cache=True,
    )
    return out.logits[:, -1], mask


def _uniforms(rows: Sequence[tuple[Prompt, int]], sampling: SamplingSpec, iteration: int) -> Tensor:
    """(B, max_new_tokens) float64 uniform numbers of every row, from its own seed."""
    drawn = []
    for prompt, index in rows:
        generator = torch.Generator().manual_seed(sample_seed(sampling.seed, iteration, prompt.index, index))
        drawn.append(torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(drawn)


class Penalties:
    """Penalties for tokens that came before, in vLLM's order: repetition, frequency, presence.

    A logit z of a token that is n times in the completion becomes ``z' - n * frequency - [n > 0] * presence``, where
    z' is ``z / r`` if z > 0, else ``z * r``, with the repetition penalty r for tokens of prompt or completion.

    Args:
        prompts: Of all rows of the batch.
        sampling: Has the penalties.
        logits: (B, V) of any of them, for size and device.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingSpec, logits: Tensor) -> None:
        self._sampling = sampling
        self._counts = torch.zeros(len(prompts), logits.shape[-1], device=logits.device)
        self._in_prompt = torch.zeros(len(prompts), logits.shape[-1], dtype=torch.bool, device=logits.device)
        for row, prompt in enumerate(prompts):
            self._in_prompt[row, torch.tensor(prompt.token_ids, device=logits.device)] = True

    def apply(self, logits: Tensor, rows: Tensor) -> Tensor:
        """(B, V) float32 penalized logits of rows (B,)."""
        spec, counts, logits = self._sampling, self._counts[rows], logits.float()
        seen = self._in_prompt[rows] | (counts > 0)
        repeated = torch.where(logits > 0, logits / spec.repetition_penalty, logits * spec.repetition_penalty)
        logits = torch.where(seen, repeated, logits)
        return logits - spec.frequency_penalty * counts - spec.presence_penalty * (counts > 0)

    def count(self, row: int, tokens: Sequence[int]) -> None:
        """Count the tokens with which a row begins."""
        counts = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=self._counts.shape[-1])
        self._counts[row] += counts.to(self._counts)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count a token (B,) of each of some rows (B,)."""
        self._counts[rows, tokens] += 1


def truncate(logits: Tensor, spec: SamplingSpec) -> Tensor:
    """Divide by the temperature and remove the tokens that min-p, top-k and top-p rule out, in vLLM's order.

    Args:
        logits: (B, V) float32.
        spec: ``temperature > 0``, ``min_p``, ``top_k``, ``top_p``.

    Returns:
        (B, V), minus infinity where a token cannot be sampled.
    """
    logits = logits / spec.temperature
    if spec.min_p > 0:  # keep p >= min_p * max p
        floor = logits.amax(-1, keepdim=True) + float(torch.tensor(spec.min_p).log())
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < spec.top_k < logits.shape[-1]:
        floor = logits.topk(spec.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if spec.top_p < 1:  # keep the smallest set whose mass reaches top_p
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= spec.top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    return logits


def sample_tokens(
    logits: Tensor,
    uniforms: Tensor,
    spec: SamplingSpec,
    forbidden: Tensor | None = None,
    penalized: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: (B, V) of any float type.
        uniforms: (B,) float64 in [0, 1).
        spec: How to sample; temperature 0 takes the most likely token.
        forbidden: (K,) token ids that must not be sampled, or ``None``.
        penalized: (B, V) the logits to sample from, where they differ; ``None``: they do not.

    Returns:
        Tokens (B,) int64 and their log-probs (B,) float32 at the temperature (1 if greedy), before truncation and
        penalties, as the trainer computes them.
    """
    logits = logits.float()
    logprobs = (logits / (spec.temperature or 1.0)).log_softmax(-1)
    logits = logits if penalized is None else penalized
    if forbidden is not None:
        logits = logits.index_fill(-1, forbidden, -torch.inf)
    if spec.temperature == 0:
        token = logits.argmax(-1)
    else:
        untruncated = forbidden is None and penalized is None and not spec.truncates
        distribution = logprobs if untruncated else truncate(logits, spec).log_softmax(-1)
        cumulative = distribution.double().exp().cumsum(-1)
        target = uniforms[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]
