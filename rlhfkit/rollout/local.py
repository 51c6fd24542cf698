"""``LocalEngine``: generation in the training process. No Ray, no server; for tests, CPUs and first notebook cells.

It holds its own copy of the policy, filled by :meth:`LocalEngine.load`, so it works the same under every strategy,
sharded ones included. A group's prompt is computed once and its cache shared; finished rows leave the batch. Sampling
inverts the cumulative distribution at one uniform number per token, drawn from the sample's own seed: what a sample
becomes does not depend on its neighbours in the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.experience import FinishReason, Prompt, Sample
from rlhfkit.models.load import load_causal_lm, load_tokenizer, stop_token_ids
from rlhfkit.rollout.engine import SamplingSpec, WeightSource, check_context, sample_seed
from rlhfkit.rollout.sampling import draw


class LocalEngine:
    """In-process engine with batching and a key-value cache; the default of ``RolloutCallback``.

    Example::

        RolloutCallback(engine=LocalEngine(max_sequences=256), reward=exact_match)

    Args:
        max_sequences: Completions generated side by side. More is faster and takes more cache.
        device: Where it runs; ``None``: where the first weights come from (a model's own: the first GPU, if any).

    Raises:
        ValueError: If ``max_sequences`` is below 1.
    """

    shared = False

    def __init__(self, *, max_sequences: int = 128, device: str | None = None) -> None:
        if max_sequences < 1:
            raise ValueError(f"LocalEngine(max_sequences=...) must be at least 1, got {max_sequences}")
        self.max_sequences = max_sequences
        self.device = None if device is None else torch.device(device)
        self.version: int | None = None
        self._model: nn.Module | None = None
        self._config: Any = None
        self._tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._dtype = torch.float32

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Read the configuration, the tokenizer and, when asked, the weights; see :meth:`RolloutEngine.start`."""
        if self._config is not None:
            return
        from transformers import AutoConfig

        self._config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        self._tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._stops = stop_token_ids(model, self._tokenizer, trust_remote_code=trust_remote_code)
        self._dtype, self._trust_remote_code = dtype, trust_remote_code
        if load_weights:
            # Not our packed attention, which has no cache of keys and values.
            loaded = load_causal_lm(model, dtype=dtype, attention="sdpa", trust_remote_code=trust_remote_code)
            self._model = self._placed(loaded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            self.version = 0

    def load(self, weights: WeightSource, version: int) -> None:
        """Copy the weights; see :meth:`RolloutEngine.load`."""
        if self._config is None:
            raise RuntimeError("LocalEngine.load was called before LocalEngine.start")
        self.version = None
        parameters = dict(self._model.named_parameters()) if self._model is not None else {}
        missing = set(parameters)
        with torch.no_grad():
            for name, tensor in weights:
                if self._model is None:
                    self._model = self._build(tensor.device)
                    parameters = dict(self._model.named_parameters())
                    missing = set(parameters)
                if name not in parameters:
                    raise RuntimeError(f"the trainer publishes {name!r}, which the engine's model does not have")
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise RuntimeError(f"the trainer did not publish {sorted(missing)}")
        self.version = version

    def _build(self, device: torch.device) -> nn.Module:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            self._config, dtype=self._dtype, attn_implementation="sdpa", trust_remote_code=self._trust_remote_code
        )
        return self._placed(model, device)

    def _placed(self, model: nn.Module, device: torch.device) -> nn.Module:
        self.device = self.device or device
        return model.requires_grad_(False).eval().to(self.device)

    def _ready(self) -> nn.Module:
        if self._model is None or self.version is None:
            raise RuntimeError(
                "LocalEngine has no weights yet: RolloutCallback publishes them, or call load() yourself"
            )
        return self._model

    @property
    def context(self) -> int:
        """Tokens the model can see."""
        return int(self._config.get_text_config().max_position_embeddings)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample; see :meth:`RolloutEngine.generate`."""
        model = self._ready()
        check_context(prompts, sampling.max_new_tokens, self.context)
        jobs = [(p, s) for p in range(len(prompts)) for s in range(sampling.group_size)]
        # Prompts of like length side by side waste the least padding; groups stay together to share their prompt.
        jobs.sort(key=lambda job: (-len(prompts[job[0]].token_ids), job))
        samples: dict[tuple[int, int], Sample] = {}
        for first in range(0, len(jobs), self.max_sequences):
            chunk = jobs[first : first + self.max_sequences]
            rows = [(prompts[p], s) for p, s in chunk]
            made = _generate(model, rows, sampling, iteration, self._stops, self._tokenizer)
            for job, (tokens, logprobs, finish) in zip(chunk, made, strict=True):
                versions = [self.version or 0] * len(tokens)
                samples[job] = Sample(prompts[job[0]], job[1], tokens, logprobs, versions, finish)
        return [samples[p, s] for p in range(len(prompts)) for s in range(sampling.group_size)]

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens; see :meth:`RolloutEngine.score`."""
        model, scores = self._ready(), []
        for sequence in sequences:
            ids = torch.tensor([list(sequence)], device=self.device)
            logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return scores

    def sleep(self) -> None:
        """Nothing to give up: the copy of the weights is what makes publishing cheap."""

    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def close(self) -> None:
        """Free everything; the engine can be started again, also with another model."""
        self._model, self._config, self._tokenizer, self.version = None, None, None, None


def _prefill(model: nn.Module, prompts: list[Prompt], device: torch.device | None) -> tuple[Tensor, Any, Tensor]:
    """Compute each distinct prompt once and give every row its copy.

    Returns:
        Logits (B, V) of the first new token, the cache, and the mask (B, T) of real tokens, padded on the left.
    """
    distinct = {id(prompt): prompt for prompt in prompts}
    row_of = {key: row for row, key in enumerate(distinct)}
    length = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.zeros(len(distinct), length, dtype=torch.int64)
    mask = torch.zeros(len(distinct), length, dtype=torch.int64)
    for row, prompt in enumerate(distinct.values()):
        ids[row, length - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, length - len(prompt.token_ids) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    rows = torch.tensor([row_of[id(prompt)] for prompt in prompts], device=device)
    out.past_key_values.batch_select_indices(rows)
    return out.logits[:, -1][rows], out.past_key_values, mask[rows]


def _uniforms(rows: list[tuple[Prompt, int]], sampling: SamplingSpec, iteration: int) -> Tensor:
    """(B, max_new_tokens) float64: the randomness of every row, from its own seed."""
    drawn = []
    for prompt, index in rows:
        generator = torch.Generator().manual_seed(sample_seed(sampling.seed, iteration, prompt.index, index))
        drawn.append(torch.rand(sampling.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(drawn)


def _ends_in_text(tokenizer: Any, tokens: Tensor, stop: tuple[str, ...]) -> Tensor:
    """(B,) bool: the text so far contains a stop text."""
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return torch.tensor([any(end in text for end in stop) for text in texts], device=tokens.device)


def _generate(
    model: nn.Module,
    rows: list[tuple[Prompt, int]],
    sampling: SamplingSpec,
    iteration: int,
    model_stops: tuple[int, ...],
    tokenizer: Any,
) -> list[tuple[list[int], list[float], FinishReason]]:
    """Token ids, log-probs and finish reason of each row, generated side by side."""
    device = next(model.parameters()).device
    stops = torch.tensor(sorted({*model_stops, *sampling.stop_token_ids}), dtype=torch.int64, device=device)
    uniforms = _uniforms(rows, sampling, iteration).to(device)
    tokens = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(len(rows), sampling.max_new_tokens, device=device)
    ends = torch.zeros(len(rows), dtype=torch.int64, device=device)  # length of a finished row; 0: still running
    logits, cache, mask = _prefill(model, [prompt for prompt, _ in rows], device)
    alive = torch.arange(len(rows), device=device)  # rows of the batch; finished ones stay until a compaction
    for step in range(sampling.max_new_tokens):
        forbidden = stops if step < sampling.min_new_tokens else None
        token, logprob = draw(logits, uniforms[alive, step], sampling, forbidden)
        tokens[alive, step], logprobs[alive, step] = token, logprob
        stopped = torch.isin(token, stops)
        if sampling.stop and step + 1 >= sampling.min_new_tokens:
            stopped |= _ends_in_text(tokenizer, tokens[alive, : step + 1], sampling.stop)
        ends[alive[stopped & (ends[alive] == 0)]] = step + 1
        running = (ends[alive] == 0).nonzero()[:, 0]
        if len(running) == 0 or step + 1 == sampling.max_new_tokens:
            break
        if len(running) <= 0.75 * len(alive):  # a smaller batch pays for the copy of the cache
            cache.batch_select_indices(running)
            alive, mask, token = alive[running], mask[running], token[running]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
        logits = model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    made: list[tuple[list[int], list[float], FinishReason]] = []
    for row, end in enumerate(ends.tolist()):
        length = end or sampling.max_new_tokens
        made.append((tokens[row, :length].tolist(), logprobs[row, :length].tolist(), "stop" if end else "length"))
    return made
