"""``LocalEngine``: generation in the training process, without Ray or a server; for tests, CPUs and notebooks.

It has its own copy of the policy, filled by :meth:`LocalEngine.load`, so it works the same under every strategy. New
weights may be loaded while another thread generates: they are swapped in between two tokens.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.models.attention.families import use_transformers_attention
from rlhfkit.models.load import load_causal_lm, load_tokenizer, stop_token_ids
from rlhfkit.rollout.collector import sample_all
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource, check_requests, check_tokens
from rlhfkit.rollout.local.caching import cache_problem, takes_finished_masks
from rlhfkit.rollout.local.generator import Decoding, FinishedRow
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


class LocalEngine(RolloutEngine):
    """In-process engine with batching and a key-value cache; the default of ``RolloutCallback``.

    Example::

        RolloutCallback(engine=LocalEngine(max_sequences=256), reward=exact_match)

    Args:
        max_sequences: Completions in a batch. More are faster and need a larger cache.
        device: ``None``: that of the first weights that are loaded (a model's own: the first GPU, if any).

    Raises:
        ValueError: If ``max_sequences`` is below 1.
    """

    shared = False
    updates_in_flight = True
    can_stream = True

    def __init__(self, *, max_sequences: int = 128, device: str | None = None) -> None:
        check_integer("max_sequences", max_sequences, minimum=1)
        self.max_sequences = max_sequences
        self.device = None if device is None else torch.device(device)
        self.version: int | None = None
        self._model: nn.Module | None = None
        self._config: Any = None
        self._tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._dtype = torch.float32
        self._cached, self._finished_masks = True, False
        self._lock = ReadWriteLock()

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
        self._name = model
        if load_weights:
            loaded = load_causal_lm(model, dtype=dtype, trust_remote_code=trust_remote_code)
            self._model = self._placed(loaded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            self.version = 0

    def load(self, weights: WeightSource, version: int) -> None:
        """Copy the weights, between two tokens of running completions; see :meth:`RolloutEngine.load`."""
        if self._config is None:
            raise RuntimeError("LocalEngine.load was called before LocalEngine.start")
        with self._lock.write():
            self._load(weights, version)

    def _load(self, weights: WeightSource, version: int) -> None:
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
                    raise RuntimeError(f"the trainer sent {name!r}, which the engine's model does not have")
                parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise RuntimeError(f"the trainer did not send {sorted(missing)}")
        self.version = version

    def _build(self, device: torch.device) -> nn.Module:
        from transformers import AutoModelForCausalLM

        how: Any = {"dtype": self._dtype, "trust_remote_code": self._trust_remote_code}
        model = AutoModelForCausalLM.from_config(self._config, **how)
        saved, sent = set(model.state_dict()), dict(model.named_parameters(remove_duplicate=False))
        if saved - sent.keys():  # buffers that a trainer does not send, such as a router's correction
            model = AutoModelForCausalLM.from_pretrained(self._name, **how)
        return self._placed(model, device)

    def _placed(self, model: nn.Module, device: torch.device) -> nn.Module:
        self.device = self.device or device
        use_transformers_attention(model)
        why = cache_problem(model)
        self._cached = why is None
        self._finished_masks = self._cached and takes_finished_masks(model)
        if why is not None:
            log.warning(
                f"LocalEngine recomputes the whole text for every token of {type(model).__name__}, which is slow: {why}"
            )
        return model.requires_grad_(False).eval().to(self.device)

    @contextmanager
    def _weights(self) -> Iterator[tuple[nn.Module, int]]:
        """A context in which the model and its version do not change."""
        with self._lock.read():
            if self._model is None or self.version is None:
                raise RuntimeError(
                    "LocalEngine has no weights yet: RolloutCallback loads them, or call load() yourself"
                )
            yield self._model, self.version

    @property
    def context(self) -> int:
        """Length of the model's context in tokens."""
        config = self._config.get_text_config()
        named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "context_length"))
        return int(next((length for length in named if length), sys.maxsize))  # recurrent models have no limit

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return int(self._config.get_text_config().vocab_size)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample; see :meth:`RolloutEngine.generate`."""
        return sample_all(self.stream(sampling, iteration=iteration), prompts)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "LocalStream":
        """Return groups as they are finished; see :class:`~rlhfkit.rollout.collector.StreamingEngine`."""
        with self._weights():  # raises if there are none
            return LocalStream(self, sampling, iteration)

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """True: log-probs are always those before truncation; see :meth:`RolloutEngine.configure_logprobs`."""
        return True

    def decode(self, rows: Sequence[tuple[Prompt, int]], sampling: SamplingSpec, iteration: int) -> Decoding:
        """Prepare to generate a batch of rows, each given by its prompt and position in its group."""
        return Decoding(
            self._weights,
            rows,
            sampling,
            iteration=iteration,
            stops=self._stops,
            tokenizer=self._tokenizer,
            device=self.device,
            cached=self._cached,
            finished_masks=self._finished_masks,
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens; see :meth:`RolloutEngine.score`."""
        scores = []
        for sequence in sequences:
            check_tokens("a sequence to be scored", sequence, self.vocabulary)
        with self._weights() as (model, _):
            for sequence in sequences:
                ids = torch.tensor([list(sequence)], device=self.device)
                logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
                scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return scores

    def close(self) -> None:
        """Free the model; the engine can be started again, also with another model."""
        self._model, self._config, self._tokenizer, self.version = None, None, None, None


class LocalStream:
    """Groups of a :class:`LocalEngine` as they are finished; a :class:`~rlhfkit.rollout.collector.GroupStream`.

    Completions are generated in batches. Prompts that are submitted during a batch wait for the next one.

    Args:
        engine: What generates.
        sampling: How to sample.
        iteration: Goes into each sample's seed.
    """

    def __init__(self, engine: LocalEngine, sampling: SamplingSpec, iteration: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._iteration = iteration
        self._prompts: list[Prompt] = []
        self._iterations: list[int] = []  # by prompt
        self._pending: list[tuple[int, int]] = []  # prompt and position in its group
        self._batch: list[tuple[int, int]] = []
        self._running: Iterator[list[FinishedRow]] = iter(())
        self._samples: dict[int, list[Sample]] = {}  # by prompt
        self._complete: list[int] = []

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Begin with the groups of these prompts too, with the seeds of an iteration; ``None``: that of the stream.

        Raises:
            RequestError: If a prompt cannot be sampled.
        """
        engine = self._engine
        check_requests(prompts, self._sampling, context=engine.context, vocabulary=engine.vocabulary)
        places = range(len(self._prompts), len(self._prompts) + len(prompts))
        self._prompts += prompts
        self._iterations += [self._iteration if iteration is None else iteration] * len(prompts)
        self._pending += [(place, index) for place in places for index in range(self._sampling.group_size)]
        # Similar lengths in a batch need the least padding; groups stay together to share their prompt.
        self._pending.sort(key=lambda job: (self._iterations[job[0]], -self._prompts[job[0]].num_tokens, job))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """Generate until a group is complete, or ``wait`` seconds have passed."""
        deadline = math.inf if wait is None else time.monotonic() + wait
        while not self._complete:
            ended = next(self._running, None)
            if ended is not None:
                self._take(ended)
            elif self._pending:
                iteration = self._iterations[self._pending[0][0]]
                ready = [job for job in self._pending if self._iterations[job[0]] == iteration]
                self._batch = ready[: self._engine.max_sequences]
                self._pending = self._pending[len(self._batch) :]  # sorted by iteration
                rows = [(self._prompts[place], index) for place, index in self._batch]
                self._running = self._engine.decode(rows, self._sampling, iteration).run()
            else:
                return []
            if time.monotonic() >= deadline:
                break
        self._complete.sort()
        given, self._complete = self._complete[:most], self._complete[most:]
        return [self._samples.pop(place) for place in given]

    def _take(self, ended: list[FinishedRow]) -> None:
        for row, tokens, logprobs, versions, finish in ended:
            place, index = self._batch[row]
            sample = Sample.from_arrays(
                self._prompts[place],
                index,
                token_ids=tokens,
                logprobs=logprobs,
                versions=versions,
                finish_reason=finish,
            )
            group = self._samples.setdefault(place, [])
            group.append(sample)
            if len(group) == self._sampling.group_size:
                group.sort(key=lambda sample: sample.sample_index)
                self._complete.append(place)

    def close(self) -> None:
        """Drop what was not collected; a second call does nothing."""
        self._pending, self._complete, self._samples, self._running = [], [], {}, iter(())


class ReadWriteLock:
    """Many readers or one writer of the weights; a waiting writer goes before new readers.

    Decoding takes the read lock for one token at a time, so that new weights never wait for a whole completion, and no
    token is computed from partly updated weights.

    Args:
        timeout: Seconds that one read or one write may take.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        self.timeout = timeout
        self._condition = threading.Condition()
        self._readers = 0
        self._waiting_writers = 0
        self._writing = False

    def __reduce__(self) -> Any:
        """Pickle as an unlocked lock, for ranks on Ray."""
        return type(self), (self.timeout,)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Hold the read lock.

        Raises:
            TimeoutError: If a write takes too long.
        """
        with self._condition:
            self._wait(lambda: not (self._writing or self._waiting_writers), "new weights took", "to arrive")
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the write lock.

        Raises:
            TimeoutError: If a read, or another write, takes too long.
        """
        with self._condition:
            self._waiting_writers += 1
            try:
                self._wait(lambda: not (self._writing or self._readers), "one token took", "to compute")
                self._writing = True
            finally:
                self._waiting_writers -= 1
                self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()

    def _wait(self, free: Callable[[], bool], what: str, ending: str) -> None:
        if not self._condition.wait_for(free, self.timeout):
            raise TimeoutError(f"{what} longer than {self.timeout:g} s {ending}")
