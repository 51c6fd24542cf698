"""``LocalEngine``: generation in the training process, without Ray or a server; for tests, CPUs and notebooks.

It has a model of its own. Its weights are the policy's tensors where these are whole on its device and training waits
while it generates, else a copy, so it works the same under every strategy. New weights may be loaded while another
thread generates: they are swapped in between two tokens.
"""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.models.attention.families import (
    cache_problem,
    sees_images,
    takes_finished_masks,
    use_transformers_attention,
)
from rlhfkit.models.load import (
    ModelLoading,
    existing_name,
    language_model_class,
    load_causal_lm,
    load_tokenizer,
    stop_token_ids,
)
from rlhfkit.rollout.collector import Group, OpenGroups, sample_all
from rlhfkit.rollout.engine import (
    DrainableWeights,
    RolloutEngine,
    SamplingSpec,
    WeightSource,
    check_requests,
    check_tokens,
)
from rlhfkit.rollout.errors import RequestError
from rlhfkit.rollout.local.generator import Decoding, FinishedRow
from rlhfkit.rollout.local.weights import EngineWeights, WeightLock, parameters_without_memory
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)


class LocalEngine(RolloutEngine):
    """In-process engine with batching and a key-value cache; the default of ``RolloutCallback``.

    Example::

        RolloutCallback(engine=LocalEngine(max_sequences=256), reward=exact_match)

    Args:
        max_sequences: Completions in a batch. More are faster and need a larger cache.
        device: ``None``: that of the first weights that are loaded (a model's own: the first GPU, if any).
        share_weights: Use the memory of the policy's weights instead of copying them; the samples are the same bit for
            bit. ``None``: where a ``RolloutCallback`` says that it is safe, which a line in the log states with the
            reason if not. It is not while training overlaps (``Ahead``) or its states leave the device
            (``SharedDevices``), nor for weights that are sharded (ZeRO 3, FSDP), merged with LoRA adapters, in 4
            bits or of another type (``bf16-mixed``). ``True``: an error where it is not safe. ``False``: never.

    Raises:
        ValueError: If ``max_sequences`` is below 1.
        TypeError: If ``share_weights`` is not ``None``, ``True`` or ``False``.
    """

    shared = False
    updates_in_flight = True
    can_stream = True

    def __init__(
        self, *, max_sequences: int = 128, device: str | None = None, share_weights: bool | None = None
    ) -> None:
        check_integer("max_sequences", max_sequences, minimum=1)
        if share_weights not in (None, True, False):
            raise TypeError(f"share_weights must be None, True or False, got {share_weights!r}")
        self.max_sequences = max_sequences
        self.device = None if device is None else torch.device(device)
        self.share_weights = share_weights
        self.version: int | None = None
        self._model: nn.Module | None = None
        self._parameters: EngineWeights | None = None
        self._said = ""  # about sharing
        self._config: Any = None
        self._tokenizer: Any = None
        self._given_tokenizer: Any = None
        self._stops: tuple[int, ...] = ()
        self._dtype = torch.float32
        self.cached = True
        """Whether keys and values are cached, once there are weights: not in families whose cache is of no use."""
        self._finished_masks = False
        self._vision: Any = None  # the processor of a model that sees images
        self._lock = WeightLock()

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._given_tokenizer = tokenizer

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Read the configuration, the tokenizer and, when asked, the weights; see :meth:`RolloutEngine.start`."""
        if self._config is not None:
            return
        from transformers import AutoConfig

        self._config = AutoConfig.from_pretrained(existing_name(model), trust_remote_code=trust_remote_code)
        self._tokenizer = self._given_tokenizer
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._stops = stop_token_ids(model, self._tokenizer, trust_remote_code=trust_remote_code)
        self._dtype, self._trust_remote_code = dtype, trust_remote_code
        self._name = model
        if load_weights:
            loading = ModelLoading(trust_remote_code=trust_remote_code)
            loaded = load_causal_lm(model, dtype=dtype, loading=loading)
            self._place(loaded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            self.version = 0

    def load(self, weights: WeightSource, version: int) -> None:
        """Take the weights, between two tokens of running completions; see :meth:`RolloutEngine.load`."""
        if self._config is None:
            raise RuntimeError("LocalEngine.load was called before LocalEngine.start")
        with self._lock.write():
            self._load(weights, version)

    def _load(self, weights: WeightSource, version: int) -> None:
        self.version = None
        missing: set[str] | None = None
        shares = False
        with torch.no_grad():
            for name, tensor in weights:
                if self._parameters is None:
                    self._build(tensor.device)
                    assert self._parameters is not None
                if missing is None:
                    missing = self._parameters.names
                    shares = self._shares(weights, tensor.device)
                if name not in self._parameters.names:
                    raise RuntimeError(f"the trainer sent {name!r}, which the engine's model does not have")
                if shares and self._parameters.fits(name, tensor):
                    self._parameters.borrow(name, tensor)
                else:
                    self._parameters.copy(name, tensor)
                missing.discard(name)
        if missing:
            raise RuntimeError(f"the trainer did not send {sorted(missing)}")
        self.version = version

    def _shares(self, weights: WeightSource, device: torch.device) -> bool:
        """Whether to use the policy's tensors themselves; logs why not. RuntimeError if that was demanded."""
        why: str | None = "they were not loaded by a RolloutCallback, and may change at any time"
        if isinstance(weights, DrainableWeights):
            why = weights.why_copied
        if device != self._device:
            why = f"they are on {device}, the engine is on {self._device}"
        if self.share_weights and why is not None:
            raise RuntimeError(f"LocalEngine(share_weights=True) cannot share the policy's weights: {why}")
        if self.share_weights is False:
            why = "share_weights=False"
        said = (
            "LocalEngine shares the memory of the policy's weights"
            if why is None
            else f"LocalEngine copies the policy's weights: {why}"
        )
        if said != self._said:
            log.info(said)
        self._said = said
        return why is None

    def _build(self, device: torch.device) -> None:
        """Build the model; its parameters get memory when they are loaded."""
        kind = language_model_class(self._config)
        how: Any = {"dtype": self._dtype, "trust_remote_code": self._trust_remote_code}
        try:
            with parameters_without_memory():
                model = kind.from_config(self._config, **how)
        except Exception as error:  # code of a model may compute with its parameters
            log.info("the engine's model is built on the CPU, as without memory it raises %r", error)
            model = kind.from_config(self._config, **how)
        saved, sent = set(model.state_dict()), dict(model.named_parameters(remove_duplicate=False))
        if saved - sent.keys():  # buffers that a trainer does not send, such as a router's correction
            model = kind.from_pretrained(self._name, **how)
        self._place(model, device)

    def _place(self, model: nn.Module, device: torch.device) -> None:
        """Take a model, whose parameters may have no memory yet."""
        self.device = self.device or device
        self._device = torch.empty(0, device=self.device).device  # with the number of a GPU
        use_transformers_attention(model)
        why = cache_problem(model)
        self.cached = why is None
        self._finished_masks = self.cached and takes_finished_masks(model)
        if why is not None:
            log.warning(
                f"LocalEngine recomputes the whole text for every token of {type(model).__name__}, which is slow: {why}"
            )
        if sees_images(self._config):
            from rlhfkit.models.vision import vision_processor

            trusted = self._trust_remote_code
            self._vision = vision_processor(self._name, self._config, trust_remote_code=trusted)
        self._model = model.requires_grad_(False).eval()
        if any(parameter.is_meta for parameter in model.parameters()):
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(self._device)
        else:
            model.to(self._device)
        self._parameters = EngineWeights(model, self._device)

    @contextmanager
    def weights(self) -> Iterator[tuple[nn.Module, int]]:
        """A context in which the model and its version do not change."""
        with self._lock.read():
            if self._model is None or self.version is None:
                raise RuntimeError(
                    "LocalEngine has no weights yet: RolloutCallback loads them, or call load() yourself"
                )
            yield self._model, self.version

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if the policy whose weights are shared was trained since they were loaded."""
        changed = None if self._parameters is None else self._parameters.changed()
        if changed is not None:
            raise RuntimeError(
                f"LocalEngine shares the policy's weights, and {changed!r} has changed since version {self.version} "
                "was loaded: sync the weights first (RolloutCallback.sync_weights), or give the engine a copy of its "
                "own, LocalEngine(share_weights=False)"
            )

    @property
    def image_processor(self) -> Any:
        return self._vision

    @property
    def context(self) -> int:
        """Length of the model's context in tokens."""
        config = self._config.get_text_config()
        named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "context_length"))
        return int(next((length for length in named if length), sys.maxsize))  # recurrent models have no limit

    @property
    def vocabulary(self) -> int:
        return int(self._config.get_text_config().vocab_size)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        return sample_all(self.stream(sampling, iteration=iteration), prompts, tokenizer=self._tokenizer)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "LocalStream":
        """Return groups as they are finished; see :class:`~rlhfkit.rollout.collector.StreamingEngine`."""
        _check_sampling(sampling)
        with self.weights():  # raises if there are none
            self._check_unchanged()
            return LocalStream(self, sampling, iteration)

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """True: log-probs are always those before truncation; see :meth:`RolloutEngine.configure_logprobs`.

        Raises RequestError, before anything is loaded, for sampling that this engine does not have.
        """
        _check_sampling(sampling)
        return True

    def resume_problem(self, sampling: SamplingSpec) -> str | None:
        """``None``: streams can be cut and continued; see :meth:`RolloutEngine.resume_problem`."""
        return None

    def decode(
        self,
        rows: Sequence[tuple[Prompt, int]],
        sampling: SamplingSpec,
        iteration: int,
        begun: Sequence[Sample | None] = (),
    ) -> Decoding:
        """Prepare to generate a batch of rows, each given by its prompt and position in its group.

        ``begun`` has the sample that each row continues, or ``None``.
        """
        return Decoding(
            self.weights,
            rows,
            sampling,
            begun=begun,
            iteration=iteration,
            stops=self._stops,
            tokenizer=self._tokenizer,
            device=self.device,
            cached=self.cached,
            finished_masks=self._finished_masks,
            vision=self._vision,
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()) -> list[list[float]]:
        scores = []
        for sequence in sequences:
            check_tokens("a sequence to be scored", sequence, self.vocabulary)
        with self.weights() as (model, _):
            self._check_unchanged()
            for row, sequence in enumerate(sequences):
                ids = torch.tensor([list(sequence)], device=self.device)
                seen = self._vision.prompts([images[row]]).arguments(model, ids, torch.ones_like(ids)) if images else {}
                logprobs = model(input_ids=ids, use_cache=False, **seen).logits[0, :-1].float().log_softmax(-1)
                scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return scores

    def close(self) -> None:
        """Free the model; the engine can be started again, also with another model."""
        self._model, self._config, self._tokenizer, self.version = None, None, None, None
        self._parameters, self._given_tokenizer, self._vision = None, None, None


def _check_sampling(sampling: SamplingSpec) -> None:
    if sampling.constrained:
        given = "regex" if sampling.regex is not None else "json_schema"
        raise RequestError(
            f"LocalEngine has no grammars, which SamplingSpec({given}=...) needs: sample with VLLMPool or VLLMServer"
        )


class LocalStream:
    """Groups of a :class:`LocalEngine` as they are finished.

    A :class:`~rlhfkit.rollout.collector.GroupStream` that is a
    :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream` too. Completions are generated in batches. Prompts that
    are submitted during a batch wait for the next one.

    Args:
        engine: What generates.
        sampling: How to sample.
        iteration: Goes into each sample's seed.
    """

    def __init__(self, engine: LocalEngine, sampling: SamplingSpec, iteration: int) -> None:
        self._engine = engine
        self._iteration = iteration
        self._groups = OpenGroups(sampling)
        self._iterations: dict[int, int] = {}  # by number of the prompt
        self._pending: list[tuple[int, int]] = []  # number of the prompt and position in its group
        self._batch: list[tuple[int, int]] = []
        self._decoding: Decoding | None = None
        self._running: Iterator[list[FinishedRow]] = iter(())

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Begin with the groups of these prompts too, with the seeds of an iteration; ``None``: that of the stream.

        Raises:
            RequestError: If a prompt cannot be sampled.
        """
        self._check(prompts)
        positions = list(range(self._groups.sampling.group_size))
        self._queue(dict.fromkeys(self._groups.open(prompts), positions), iteration)

    def resume(self, groups: Sequence[Group], *, iteration: int | None = None) -> None:
        """Continue these groups; see :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream`."""
        self._check([group[0].prompt for group in groups])
        self._queue(self._groups.reopen(groups), iteration)

    def _check(self, prompts: Sequence[Prompt]) -> None:
        engine = self._engine
        limits: dict[str, Any] = {"context": engine.context, "vocabulary": engine.vocabulary}
        check_requests(prompts, self._groups.sampling, **limits, sees_images=engine.image_processor is not None)

    def _queue(self, missing: Mapping[int, list[int]], iteration: int | None) -> None:
        """Add jobs; similar lengths in a batch need the least padding, and groups stay together to share a prompt."""
        groups = self._groups
        self._iterations |= dict.fromkeys(missing, self._iteration if iteration is None else iteration)
        self._pending += [(number, index) for number, indices in missing.items() for index in indices]

        def tokens(job: tuple[int, int]) -> int:
            return groups.prompts[job[0]].num_tokens + (groups.begun[job].num_tokens if job in groups.begun else 0)

        self._pending.sort(key=lambda job: (self._iterations[job[0]], -tokens(job), job))

    def cut(self) -> list[Group]:
        for row in [] if self._decoding is None else self._decoding.cut():
            self._add(row)
        groups = self._groups.take_all()
        self.close()
        return groups

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Generate until a group is complete, or ``wait`` seconds have passed."""
        deadline = math.inf if wait is None else time.monotonic() + wait
        groups = self._groups
        while not groups.complete:
            ended = next(self._running, None)
            if ended is not None:
                for row in ended:
                    self._add(row)
            elif self._pending:
                iteration = self._iterations[self._pending[0][0]]
                ready = [job for job in self._pending if self._iterations[job[0]] == iteration]
                self._batch = ready[: self._engine.max_sequences]
                self._pending = self._pending[len(self._batch) :]  # sorted by iteration
                rows = [(groups.prompts[number], index) for number, index in self._batch]
                begun = [groups.begun.pop(job, None) for job in self._batch]
                self._decoding = self._engine.decode(rows, groups.sampling, iteration, begun)
                self._running = self._decoding.run()
            else:
                return []
            if time.monotonic() >= deadline:
                break
        return groups.take(most)

    def _add(self, made: FinishedRow) -> None:
        """Add the sample of a row."""
        number, index = self._batch[made.row]
        sample = Sample(
            self._groups.prompts[number],
            index,
            token_ids=made.token_ids,
            logprobs=made.logprobs,
            versions=made.versions,
            finish_reason=made.finish_reason,
        )
        self._groups.add(number, [sample])

    def close(self) -> None:
        self._groups.clear()
        self._pending, self._running, self._decoding = [], iter(()), None
