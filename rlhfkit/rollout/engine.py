"""``RolloutEngine`` and ``SamplingSpec``: what an engine does, and how it is asked to sample.

Engines take and return token ids, so text is never tokenized twice. Samples do not depend on whether each rank has its
own engine (:class:`~rlhfkit.LocalEngine`) or all share one (:class:`~rlhfkit.VLLMPool`), as each has its own seed.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhfkit.argument_names import AnswersNames
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.errors import RequestError
from rlhfkit.validation import check_integer, check_number

MIN_TEMPERATURE = 1e-4
"""Lowest temperature that is not greedy: float32 logits that are divided by it stay finite."""

MAX_STOP_TOKEN_IDS = 96
"""Limit per request: vLLM 0.32 crashes on GPUs with more than 128, the model's end-of-sequence tokens included."""


@dataclass(frozen=True, kw_only=True)
class SamplingSpec(metaclass=AnswersNames):
    """How completions are sampled. Every field is sent, so that no engine uses the model's own defaults.

    Example::

        SamplingSpec(group_size=8, max_new_tokens=1024, temperature=1.0)
    """

    group_size: int = 8
    """Completions per prompt (TRL's ``num_generations`` default)."""
    max_new_tokens: int = 1024
    """Maximum tokens per completion."""
    min_new_tokens: int = 0
    """Minimum tokens before a completion may end."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy, of which a prompt has one completion (``group_size=1``)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose total probability reaches this; 1 is off."""
    top_k: int = 0
    """Sample from this many most likely tokens only; 0 is off."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this share of the most likely one's; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; a single string is accepted."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's end-of-sequence tokens."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or completion are divided by it where positive, else multiplied; 1 is off (CTRL,
    Keskar et al., 2019, arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the completion; 0 is off (OpenAI's API)."""
    frequency_penalty: float = 0.0
    """Subtracted as many times as a token is in the completion; 0 is off (OpenAI's API)."""
    regex: str | None = None
    """Pattern that every completion matches as a whole, unless it is cut off; vLLM only."""
    json_schema: Any = None
    """JSON schema of every completion, a mapping or its JSON text, which is what it becomes; vLLM only."""
    seed: int = 0
    """Base of all sampling seeds."""

    def greedy(self) -> "SamplingSpec":
        """The most likely completion, one of the same length."""
        return replace(self, group_size=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    def __post_init__(self) -> None:
        check_integer("SamplingSpec.group_size", self.group_size, minimum=1)
        check_integer("SamplingSpec.max_new_tokens", self.max_new_tokens, minimum=1)
        most = int(self.max_new_tokens)
        check_integer("SamplingSpec.min_new_tokens", self.min_new_tokens, minimum=0, maximum=most, why="max_new_tokens")
        check_number("SamplingSpec.temperature", self.temperature, minimum=0, why="0 is greedy")
        check_number("SamplingSpec.top_p", self.top_p, above=0, maximum=1, why="1 is off")
        check_integer("SamplingSpec.top_k", self.top_k, minimum=0, maximum=2**31 - 1, why="0 is off")
        check_number("SamplingSpec.min_p", self.min_p, minimum=0, below=1, why="0 is off")
        check_integer("SamplingSpec.seed", self.seed)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"SamplingSpec.temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature}: "
                "logits divided by less overflow"
            )
        if self.temperature == 0 and self.group_size > 1:  # vLLM refuses it too; training would learn nothing
            raise ValueError(
                f"SamplingSpec.temperature is 0, which is greedy, and {self.group_size} completions of a prompt would "
                "all be the same: give group_size=1, or a temperature above 0"
            )
        # A string is one text, not a list of letters. YAML and notebooks pass lists.
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, list | tuple) or not all(map(_is_stop_text, stop)):
            raise ValueError(f"SamplingSpec.stop must be a text or several, none of them empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        ids: Any = self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(map(_is_token_id, ids)) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"SamplingSpec.stop_token_ids must be a list of up to {MAX_STOP_TOKEN_IDS} token ids, integers from 0 "
                f"on, got {ids!r:.200}"
            )
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        check_number("SamplingSpec.repetition_penalty", self.repetition_penalty, above=0, why="1 is off")
        check_number("SamplingSpec.presence_penalty", self.presence_penalty, minimum=-2, maximum=2, why="0 is off")
        check_number("SamplingSpec.frequency_penalty", self.frequency_penalty, minimum=-2, maximum=2, why="0 is off")
        if self.regex is not None and (not isinstance(self.regex, str) or not self.regex):
            raise ValueError(f"SamplingSpec.regex must be a pattern, or None for any text, got {self.regex!r}")
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("SamplingSpec takes regex or json_schema, not both: a completion has one form")

    @property
    def truncates(self) -> bool:
        """Whether a distribution other than the policy's is sampled from.

        Tokens are excluded, by ``top_p``, ``top_k``, ``min_p`` (unused if greedy), ``min_new_tokens`` or a form, or
        penalized.
        """
        tail = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        return tail or self.min_new_tokens > 0 or self.penalizes or self.constrained

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens that came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def constrained(self) -> bool:
        """Whether completions have a form, by ``regex`` or ``json_schema``, which vLLM's grammars enforce."""
        return self.regex is not None or self.json_schema is not None


def _is_stop_text(value: Any) -> bool:
    """Whether a model could produce this text, which excludes lone surrogates (half of a UTF-16 pair)."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _schema_text(schema: Any) -> str | None:
    """Return a JSON schema as text, by which equal ones are equal; ValueError if it is none."""
    if schema is None:
        return None
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(schema, Mapping):
            raise TypeError(f"it is a {type(schema).__name__}")
        return json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"SamplingSpec.json_schema must be a JSON schema, a mapping or its JSON text, got {str(schema)[:80]!r}: "
            f"{error}"
        ) from None


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def sample_seed(seed: int, iteration: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one sample, a 63-bit non-negative integer that depends on these arguments only.

    Args:
        seed: The run's seed.
        iteration: Iteration of the training loop.
        prompt_index: Row of the prompt in its dataset.
        sample_index: Position in the group.
    """
    digest = hashlib.blake2b(f"{seed}/{iteration}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Name, shape and type of one tensor of a :class:`WeightSource`; known without gathering it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class WeightSource:
    """The trainer's weights, sharded or not. Iterating is a collective: every rank must iterate to the end.

    A subclass implements :meth:`metadata` and ``__iter__``.
    """

    def metadata(self) -> list[WeightInfo]:
        """Describe what iterating yields, in order."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the full value of each tensor; it is valid until the next one is yielded."""
        raise NotImplementedError

    def in_checkpoint_format(self) -> "WeightSource":
        """Return the weights with the names, shapes and buffers of ``save_pretrained`` files, which vLLM reads.

        Returns the source itself if nothing differs.
        """
        return self

    def adapter_settings(self) -> dict[str, Any] | None:
        """Return rank, scale and targets, in peft's terms, of a LoRA adapter that can be sent apart; ``None``: of none.

        Raises:
            ValueError: With the reason, if it has to be merged into the weights under it.
        """
        return None

    def adapter_apart(self, *, with_base: bool) -> "WeightSource":
        """Return the adapter's matrices alone, ``with_base`` after the weights under it, for an engine's LoRA slots."""
        raise NotImplementedError


class DrainableWeights(WeightSource):
    """A weight source that can be read to its end after an engine failed, as other ranks wait in its collectives.

    ``why_copied``: why an engine in this process has to copy what is yielded; ``None`` if these are the policy's own
    tensors, which do not change while it generates.
    """

    def __init__(self, weights: WeightSource, *, why_copied: str | None = "they may change at any time") -> None:
        self.why_copied = why_copied
        self._source = weights
        self._weights = weights
        self._iterator: Iterator[tuple[str, Tensor]] | None = None

    def metadata(self) -> list[WeightInfo]:
        return self._weights.metadata()

    def in_checkpoint_format(self) -> "DrainableWeights":
        self._weights = self._source.in_checkpoint_format()
        return self

    def adapter_settings(self) -> dict[str, Any] | None:
        return self._source.adapter_settings()

    def adapter_apart(self, *, with_base: bool) -> "DrainableWeights":
        self._weights = self._source.adapter_apart(with_base=with_base)
        return self

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the source; an engine that stops reading does not close the iterator."""
        self._iterator = iter(self._weights)
        return self._iterator

    def drain(self) -> None:
        """Read what has not been read."""
        for _ in self._iterator or self:
            pass


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from the current policy. Derive from this class and override what differs.

    The attributes declare what an engine can do besides sampling.
    """

    version: int | None = None
    """Policy version of the weights that are served; ``None`` before the first :meth:`load`."""
    shared: bool = False
    """Whether all ranks use the same engine, which rank 0 runs and every rank asks for itself.

    ``generate``, ``score`` and streams are then called on any rank, from any thread, for this rank alone.
    """
    colocate: bool = False
    """Whether it uses the training ranks' GPUs and has to sleep while the policy is trained."""
    updates_in_flight: bool = False
    """Whether :meth:`load` may run while another thread generates; samples record the version of each token."""
    can_stream: bool = False
    """Whether it is a :class:`~rlhfkit.rollout.collector.StreamingEngine`, which has ``stream``."""
    continuous_batching: bool = False
    """Whether later requests run beside earlier ones, and several streams may be open, each in a thread."""
    can_score: bool = True
    """Whether :meth:`score` works; the probe after a weight sync needs it."""
    recorded: bool = False
    """Whether its samples are whole episodes of an earlier run, so that single turns cannot be requested."""
    shortens_answers: bool = False
    """Whether completions are cut to fit into the context, so that a prompt needs room for only one token."""

    @property
    def quantized(self) -> bool:
        """Whether it computes with fewer bits than it is sent, so that its log-probs differ from the policy's."""
        return False

    @property
    def image_processor(self) -> Any:
        """The :class:`~rlhfkit.models.vision.VisionProcessor` of a model that sees, whose prompts may have images.

        ``None``: it reads text only.
        """
        return None

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and completion; ``None``: the model's context."""
        return None

    def resume_problem(self, sampling: SamplingSpec) -> str | None:
        """Why samples of this kind cannot be cut and continued later.

        Returns:
            The reason; ``None`` if ``stream`` returns a
            :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream`.
        """
        return f"{type(self).__name__} cannot continue what it has begun"

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """Prepare to report log-probs for samples of this kind; called on every rank before :meth:`start`.

        Log-probs of a truncated distribution exceed the trainer's by the log of the probability that was kept.

        Args:
            sampling: How training will sample.

        Returns:
            Whether the log-probs will be the policy's at the sampling temperature before truncation; by default,
            whether nothing is truncated.
        """
        return not sampling.truncates

    def configure_weights(self, weights: WeightSource) -> None:
        """Prepare for the weights that :meth:`load` will bring; called on every rank before :meth:`start`.

        By default nothing is prepared. It must not iterate over them.
        """
        return

    def check_model(self, model: str, *, trust_remote_code: bool = False) -> None:
        """Check that the engine can serve a model on this machine, by its configuration alone. Nothing by default.

        ``RolloutCallback`` calls it on every rank before a model is loaded; arguments are those of :meth:`start`.

        Raises:
            ImportError: If a package is missing.
            EngineError: If the engine cannot run the model.
        """
        return

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer in place of the model's own; called on every rank before :meth:`start`.

        By default it is not needed.

        Args:
            tokenizer: Encodes the prompts, and decodes the samples.
            chat_template_kwargs: What its chat template is given for prompts; ``None``: unknown.

        Raises:
            ValueError: If the engine was given something else.
        """
        return

    @abstractmethod
    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Prepare to serve a model; a second call does nothing.

        Args:
            model: Folder or hub name with the configuration and tokenizer.
            dtype: Type of the weights that will be loaded.
            trust_remote_code: Run Python code that comes with the model.
            load_weights: Serve the model's own weights as version 0; otherwise they come with the first :meth:`load`.
        """
        ...

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample ``group_size`` completions of each prompt.

        Args:
            prompts: Prompts to complete.
            sampling: How to sample.
            iteration: Part of each sample's seed (:func:`sample_seed`).

        Returns:
            ``len(prompts) * group_size`` samples, prompt by prompt. Their ``logprobs`` are the policy's at the sampling
            temperature **before** truncation (``SamplingSpec.truncates``), or NaN where the engine does not know them.

        Raises:
            RequestError: If a prompt exceeds the context or has unknown tokens; before anything is sampled.
            RuntimeError: If no weights are loaded, or the engine died.
        """
        ...

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()) -> list[list[float]]:
        """Return the log-probs (temperature 1, nothing truncated) of each token after the first.

        Args:
            sequences: Token ids, at least two each; n tokens give n - 1 numbers.
            images: Those of each sequence, for an engine that sees them (:attr:`image_processor`); empty: none has any.
        """
        ...

    def scores(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()
    ) -> Mapping[str, list[list[float]]]:
        """Return :meth:`score` of every engine that there is, by what messages call it: what a probe compares."""
        return {"the engine": self.score(sequences, images) if images else self.score(sequences)}

    @abstractmethod
    def load(self, weights: WeightSource, version: int) -> None:
        """Serve these weights from now on. Called on every rank; rank 0 sends them if the engine is shared.

        An engine that sleeps serves them after :meth:`wake`.

        Args:
            weights: This rank's source.
            version: Becomes :attr:`version` once all weights have arrived.
        """
        ...

    def sync_metrics(self) -> Mapping[str, float]:
        """Return what is logged of the last :meth:`load`; that of rank 0 is used. Nothing by default."""
        return {}

    def load_metrics(self) -> Mapping[str, float]:
        """Return what is logged of how busy the engine was since the last call, on rank 0. Nothing by default."""
        return {}

    def sleep(self) -> None:
        """Free memory that is not needed until :meth:`wake`; does nothing by default."""
        return

    def wake(self) -> None:
        """Undo :meth:`sleep`; does nothing to an engine that is awake."""
        return

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        return


def check_context(prompts: Iterable[Prompt], max_new_tokens: int, context: int) -> None:
    """Raise RequestError if a prompt is empty or, with ``max_new_tokens``, exceeds ``context`` tokens."""
    for prompt in prompts:
        if not prompt.num_tokens:
            raise RequestError(f"prompt {prompt.index} has no tokens; every prompt needs at least one")
        if prompt.num_tokens + max_new_tokens > context:
            raise RequestError(
                f"prompt {prompt.index} has {prompt.num_tokens} tokens and max_new_tokens is {max_new_tokens}, but "
                f"the model's context is {context}: shorten the prompts (PromptDataModule(max_prompt_length=...)) or "
                "lower SamplingSpec(max_new_tokens=...)"
            )


def check_tokens(what: str, token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise RequestError for the first of ``token_ids`` that the model does not know; ``what`` says what has them."""
    whole = set(map(type, token_ids)) <= {int}
    if token_ids and not (whole and min(token_ids) >= 0 and max(token_ids) < vocabulary):
        wrong = next(one for one in token_ids if type(one) is not int or not 0 <= one < vocabulary)
        raise RequestError(
            f"{what} has the token {wrong!r}, and the model knows the whole numbers 0 to {vocabulary - 1}: encode with "
            "the tokenizer of the model that generates"
        )


def check_scored(sequences: Sequence[Sequence[int]], *, context: int, vocabulary: int) -> None:
    """Raise ValueError unless each has at least 2 tokens and less than ``context``; RequestError for unknown tokens."""
    for sequence in sequences:
        if not 2 <= len(sequence) < context:
            raise ValueError(
                f"score() takes sequences of 2 to {context - 1} tokens (the engine samples one more), got one of "
                f"{len(sequence)}"
            )
        check_tokens("a sequence to be scored", sequence, vocabulary)


def check_requests(
    prompts: Sequence[Prompt], sampling: SamplingSpec, *, context: int, vocabulary: int, sees_images: bool = False
) -> None:
    """Raise RequestError for an unknown stop token, or a prompt with unknown tokens, beyond the context, or unseen, and
    TypeError for one that is no :class:`Prompt`.

    ``sees_images``: whether the engine gives the model the images of prompts.
    """
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            raise TypeError(
                f"a prompt is Prompt(index, token_ids), tokens of the model's tokenizer; got {prompt!r:.80}"
            )
    seeing = next((prompt.index for prompt in prompts if prompt.attachments), None)
    if seeing is not None and not sees_images:
        raise RequestError(
            f"prompt {seeing} has images, which this engine does not give to its model: sample with LocalEngine() or "
            "VLLMPool() from a model that sees them, or with VLLMServer from one of `vllm serve --enable-scale-out`"
        )
    check_tokens("SamplingSpec.stop_token_ids", sampling.stop_token_ids, vocabulary)
    check_context(prompts, sampling.max_new_tokens, context)
    for prompt in prompts:
        check_tokens(f"prompt {prompt.index}", prompt.token_ids.tolist(), vocabulary)
