"""The rollout contract: what an engine does, and how it is asked to sample.

Engines take token ids and give token ids; text is never tokenised twice. One engine may live in every rank
(:class:`~rlhfkit.LocalEngine`) or be shared by all of them (:class:`~rlhfkit.VLLMPool`); a
sample is the same either way, because its randomness comes from its own seed.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.errors import RequestError
from rlhfkit.validation import check_integer, check_number

MIN_TEMPERATURE = 1e-4
"""Lowest temperature that is not greedy. Float32 logits stay finite when they are divided by it."""

MAX_STOP_TOKEN_IDS = 96
"""Of one request. vLLM 0.32 takes 128 on GPUs, the model's end-of-sequence tokens included, and dies of more."""


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """How completions are sampled. Every field is always sent, so no engine falls back to a model's own defaults.

    Example::

        SamplingSpec(group_size=8, max_new_tokens=1024, temperature=1.0)
    """

    group_size: int = 8
    """Completions per prompt (TRL's ``num_generations`` default)."""
    max_new_tokens: int = 1024
    """Tokens per completion at most."""
    min_new_tokens: int = 0
    """No end of sequence before that many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """That many most likely tokens only; 0 is off."""
    min_p: float = 0.0
    """Only tokens at least this likely relative to the likeliest; 0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; a single one may be given as it is."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's end-of-sequence tokens."""
    seed: int = 0
    """Base of all sampling seeds of the run."""

    def __post_init__(self) -> None:
        """Check every field once, where it is written, so that no engine is ever sent one that it cannot take."""
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
        # One text is a text, not a list of its letters. YAML and notebooks hand over lists.
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

    @property
    def truncates(self) -> bool:
        """Whether tokens that the policy gives a probability are never drawn.

        True with ``top_p``, ``top_k`` or ``min_p`` (greedy sampling ignores them), and with ``min_new_tokens``, before
        which no completion may end.
        """
        tail = self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        return tail or self.min_new_tokens > 0


def _is_stop_text(value: Any) -> bool:
    """Whether this is a text that can stand in what a model says; half of a UTF-16 pair cannot."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def sample_seed(seed: int, iteration: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample, a function of what the sample is and of nothing else (rank, engine, batch, order).

    Args:
        seed: The run's seed.
        iteration: Iteration of the training loop.
        prompt_index: Row of the prompt in its data set.
        sample_index: Position in the group.

    Returns:
        A 63-bit non-negative integer.
    """
    digest = hashlib.blake2b(f"{seed}/{iteration}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """Name, shape and type of one published tensor; known without gathering it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class WeightSource(Protocol):
    """The trainer's weights, wherever they are sharded. Iterating is a collective: every rank must do it to the end."""

    def metadata(self) -> list[WeightInfo]:
        """What iterating will yield, in order."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name; valid until the next one is drawn."""
        ...

    def as_saved(self) -> "WeightSource":
        """The same weights under the names and in the shapes of files of ``save_pretrained``, which vLLM reads.

        Files also hold buffers that are no parameters. The source itself where nothing differs.
        """
        ...


class DrainableWeights:
    """A weight source that can be read to its end after an engine has failed to: other ranks wait in its collectives.

    Args:
        weights: The source.
    """

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._iterator: Iterator[tuple[str, Tensor]] | None = None

    def metadata(self) -> list[WeightInfo]:
        """Return the metadata of the source."""
        return self._weights.metadata()

    def as_saved(self) -> "DrainableWeights":
        """Switch to the source's :meth:`WeightSource.as_saved` and return this object."""
        self._weights = self._weights.as_saved()
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
    """Something that samples from the current policy.

    What an engine can do besides sampling is said by the properties below, and nowhere else: whoever uses an engine
    asks them, and a wrapper (:class:`~rlhfkit.episodes.engine_wrapper.EngineWrapper`) hands them on. Their defaults are
    those of an engine that can do nothing special; derive from this class and state what differs.

    With truncated sampling one more thing is asked, of engines that are an :class:`UntruncatedLogprobs`.
    """

    version: int | None = None
    """Policy version of the weights being served; ``None`` before the first :meth:`load`."""

    @property
    def shared(self) -> bool:
        """True: one engine serves all ranks, only rank 0 calls ``generate`` and ``score``. False: each rank has one."""
        return False

    @property
    def colocate(self) -> bool:
        """Whether it uses the GPUs of the training ranks, so that it has to sleep while the policy learns."""
        return False

    @property
    def updates_in_flight(self) -> bool:
        """Whether :meth:`load` may be called while another thread is in :meth:`generate`.

        Its samples go on with the new weights then, and know the version of each token.
        """
        return False

    @property
    def can_stream(self) -> bool:
        """Whether it gives groups as they end, and can drop the rest.

        If so it has ``stream``: :class:`~rlhfkit.rollout.collector.StreamingEngine`.
        """
        return False

    @property
    def can_score(self) -> bool:
        """Whether there is a model that :meth:`score` can ask; the probe after a weight sync needs one."""
        return True

    @property
    def recorded(self) -> bool:
        """Whether samples are those of an earlier run: whole episodes, of which no single turn can be asked for."""
        return False

    @property
    def shortens_answers(self) -> bool:
        """Whether answers are cut to the room that the context leaves, so that a prompt needs room for one token."""
        return False

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and completion together; ``None``: the model's context."""
        return None

    @abstractmethod
    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Get ready to serve a model; a second call does nothing.

        Args:
            model: Folder or hub name with the configuration and tokenizer.
            dtype: Type of the weights that will be loaded.
            trust_remote_code: Passed to Transformers.
            load_weights: Serve the model's own weights, as version 0: for generating without a trainer. Else weights
                come with the first :meth:`load`.
        """
        ...

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample ``group_size`` completions of each prompt.

        Args:
            prompts: What to complete.
            sampling: How.
            iteration: Goes into each sample's seed (:func:`sample_seed`).

        Returns:
            ``len(prompts) * group_size`` samples, the samples of a prompt side by side, in the order of the prompts.
            Their ``logprobs`` are those of the policy at the sampling temperature **before** truncation
            (``SamplingSpec.truncates``), or NaN where the engine does not know them.

        Raises:
            RequestError: If a prompt leaves no room in the model's context or has tokens that it does not know; before
                anything is sampled.
            RuntimeError: If no weights were loaded yet, or the engine died.
        """
        ...

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities (temperature 1, nothing truncated) of each token after the first.

        Args:
            sequences: Token ids, at least two each.

        Returns:
            For a sequence of n tokens, n - 1 numbers.
        """
        ...

    @abstractmethod
    def load(self, weights: WeightSource, version: int) -> None:
        """Serve these weights from now on. Called by every rank; rank 0 sends when the engine is shared.

        Args:
            weights: Where they come from.
            version: What ``version`` becomes when, and only when, all of them have arrived.
        """
        ...

    def sleep(self) -> None:
        """Give up memory that is not needed until :meth:`wake`; a hint. Nothing, unless an engine says otherwise."""

    def wake(self) -> None:
        """Undo :meth:`sleep`; nothing happens to one that is awake."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""


@runtime_checkable
class UntruncatedLogprobs(Protocol):
    """An engine that can say what a token's log-prob was before ``top_p``, ``top_k`` and the like were applied.

    The trainer computes log-probs over the whole vocabulary. Those of the truncated distribution are larger by the
    log of the mass that was kept, at every token, even where engine and trainer hold the same weights.
    """

    def arrange_logprobs(self, sampling: SamplingSpec) -> bool:
        """Prepare for samples of this kind; asked before :meth:`RolloutEngine.start`, by every rank.

        Args:
            sampling: How training will sample.

        Returns:
            Whether their log-probs will be those of the policy at the sampling temperature, nothing truncated.
        """
        ...


def arrange_logprobs(engine: RolloutEngine, sampling: SamplingSpec) -> bool:
    """Whether an engine's log-probs of such samples can be compared with the trainer's.

    Args:
        engine: Asked if it is an :class:`UntruncatedLogprobs`; one that is not can where nothing is truncated.
        sampling: How training will sample.
    """
    return engine.arrange_logprobs(sampling) if isinstance(engine, UntruncatedLogprobs) else not sampling.truncates


def check_context(prompts: Iterable[Prompt], max_new_tokens: int, context: int) -> None:
    """Raise if a prompt and its completion do not fit into the model's context.

    Args:
        prompts: To be checked.
        max_new_tokens: Room that each needs behind it.
        context: Tokens the model can see.

    Raises:
        RequestError: Naming the first prompt that does not fit, and the cure.
    """
    for prompt in prompts:
        if not prompt.token_ids:
            raise RequestError(f"prompt {prompt.index} has no tokens; every prompt needs at least one")
        if len(prompt.token_ids) + max_new_tokens > context:
            raise RequestError(
                f"prompt {prompt.index} has {len(prompt.token_ids)} tokens and max_new_tokens is {max_new_tokens}, but "
                f"the model's context is {context}: shorten the prompts (PromptDataModule(max_prompt_length=...)) or "
                "lower SamplingSpec(max_new_tokens=...)"
            )


def check_tokens(what: str, token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise unless the model knows all of these tokens.

    Args:
        what: Whose they are, for the message.
        token_ids: To be checked.
        vocabulary: Tokens of the model.

    Raises:
        RequestError: Naming the first that is none.
    """
    whole = set(map(type, token_ids)) <= {int}
    if token_ids and not (whole and min(token_ids) >= 0 and max(token_ids) < vocabulary):
        wrong = next(one for one in token_ids if type(one) is not int or not 0 <= one < vocabulary)
        raise RequestError(
            f"{what} has the token {wrong!r}, and the model knows the whole numbers 0 to {vocabulary - 1}: encode with "
            "the tokenizer of the model that generates"
        )


def check_requests(prompts: Sequence[Prompt], sampling: SamplingSpec, *, context: int, vocabulary: int) -> None:
    """Raise if an engine could not sample these prompts: before anything is sent.

    Args:
        prompts: To be checked.
        sampling: How they are to be sampled.
        context: Tokens the model can see.
        vocabulary: Tokens of the model.

    Raises:
        RequestError: Naming the first prompt that is wrong, and the cure.
    """
    check_tokens("SamplingSpec.stop_token_ids", sampling.stop_token_ids, vocabulary)
    check_context(prompts, sampling.max_new_tokens, context)
    for prompt in prompts:
        check_tokens(f"prompt {prompt.index}", prompt.token_ids, vocabulary)
