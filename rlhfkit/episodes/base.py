"""``EpisodeEngineBase``: what engines share whose samples are episodes, run concurrently in one event loop."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.episodes.event_loop import EventLoopThread
from rlhfkit.episodes.sampler import EngineFailedError
from rlhfkit.rollout.collector import sample_all
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, check_context
from rlhfkit.rollout.wrappers.engine_wrapper import EngineWrapper
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)


class EpisodeError(RuntimeError):
    """An environment or agent failed and ``on_error`` is ``"raise"``, or all episodes failed."""


class RunnableEpisode(Protocol):
    """One episode."""

    error: Exception | None
    """The exception that ended the episode early."""

    async def run(self) -> Sample:
        """Run the episode to its end; the sample's ``info`` has ``failed``, ``turns`` and ``ended``."""
        ...


class EpisodeFactory(Protocol):
    """Creates the episodes of one stream."""

    def __call__(self, prompt: Prompt, sample_index: int, *, iteration: int) -> RunnableEpisode:
        """Create the episode of a prompt and an index in its group; ``iteration`` goes into its seeds."""
        ...


class EpisodeEngineBase(EngineWrapper):
    """Runs episodes concurrently in the event loop of one thread. Subclasses define the episodes.

    Validation runs episodes too. Arguments and errors are those of :class:`~rlhfkit.episodes.EpisodeEngine`.
    ``blocked_after``: seconds that one step of async code may block the event loop before that is an error.
    """

    changes_training_only = False

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        max_turns: int,
        max_episode_tokens: int | None,
        episode_timeout: float,
        blocked_after: float,
        concurrency: int | None,
        parallel_calls: int | None,
        on_error: Literal["mask", "raise"],
    ) -> None:
        super().__init__(engine)
        check_integer("max_turns", max_turns, minimum=1)
        check_integer("max_episode_tokens", max_episode_tokens, minimum=2, optional=True)
        check_number("episode_timeout", episode_timeout, above=0, why="it is in seconds")
        check_integer("concurrency", concurrency, minimum=1, optional=True)
        check_integer("parallel_calls", parallel_calls, minimum=1, optional=True)
        if on_error not in ("mask", "raise"):
            raise ValueError(f"on_error must be 'mask' or 'raise', got {on_error!r}")
        self.max_turns = max_turns
        self.max_episode_tokens = max_episode_tokens
        self.episode_timeout = episode_timeout
        self.blocked_after = blocked_after
        self.concurrency = concurrency
        self.parallel_calls = parallel_calls
        self.on_error = on_error
        self.loop = EventLoopThread("rlhfkit-episodes")
        self._context: int | None = None
        self._given_tokenizer: Any = None
        self._tokenizer: Any = None  # the one in use
        self._template_arguments: Mapping[str, Any] | None = None  # what the DataModule gives the chat template

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer and template; see :meth:`RolloutEngine.configure_tokenizer`."""
        super().configure_tokenizer(tokenizer, chat_template_kwargs)
        self._given_tokenizer, self._template_arguments = tokenizer, chat_template_kwargs

    def run_tokenizer(self, model: str, trust_remote_code: bool) -> Any:
        """Return the tokenizer of the run, that of the model if there is no run."""
        from rlhfkit.models.load import load_tokenizer

        given = self._given_tokenizer
        self._tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code) if given is None else given
        return self._tokenizer

    def template_arguments(self, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what the chat template is given: what the engine was given, else what the DataModule gives it."""
        return dict(self._template_arguments or {}) if own is None else dict(own)

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Get ready to serve a model; see :meth:`RolloutEngine.start`."""
        super().start(model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=load_weights)
        if self._context is None:
            self._context = _model_context(self.engine, model, trust_remote_code)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self.loop.close()
        self._context, self._given_tokenizer, self._template_arguments = None, None, None
        super().close()

    @property
    def max_context_tokens(self) -> int:
        """Maximum number of tokens of an episode, prompt included."""
        if self._context is None:
            raise RuntimeError(f"{type(self).__name__} was asked for samples before it was started")
        return min(self.max_episode_tokens or self._context, self._context)

    def episode_factory(self, sampling: SamplingSpec) -> EpisodeFactory:
        """Return a function that creates the episodes of one stream; abstract."""
        # Abstract by hand: EngineWrapper is a Protocol with members of its own, whose subclasses can be built.
        raise NotImplementedError(f"{type(self).__name__} must define episode_factory()")

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``ValueError`` if a prompt leaves no room for a completion."""
        check_context(prompts, 1, self.max_context_tokens)

    @property
    def shortens_answers(self) -> bool:
        """True: a turn is limited to the tokens left in the episode."""
        return True

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of an episode; ``None``: the model's context."""
        limits = [limit for limit in (self.max_episode_tokens, self.engine.max_model_len) if limit is not None]
        return min(limits, default=None)

    @property
    def can_stream(self) -> bool:
        """Whether groups are returned as they finish; false if the engine replays recorded samples."""
        return not self.engine.recorded

    @property
    def continuous_batching(self) -> bool:
        """Whether the engine runs later requests beside earlier ones; turns pass through wrappers one by one."""
        inner = self.engine
        while isinstance(inner, EngineWrapper):
            inner = inner.engine
        return self.can_stream and inner.continuous_batching

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "EpisodeStream":
        """Return a stream of groups; see :class:`~rlhfkit.rollout.collector.StreamingEngine`."""
        return EpisodeStream(self, sampling, iteration)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Run ``group_size`` episodes per prompt; see :meth:`RolloutEngine.generate`. Recorded samples are replayed.

        Raises:
            ValueError: If a prompt leaves no room for a completion.
            EpisodeError: If all episodes failed, or one did and ``on_error`` is ``"raise"``.
            BlockedLoopError: If async code of an episode blocks the event loop.
            Exception: Any exception of the engine.
        """
        if self.engine.recorded:
            return self.engine.generate(prompts, sampling, iteration=iteration)
        return sample_all(self.stream(sampling, iteration=iteration), prompts, tokenizer=self._tokenizer)


class EpisodeStream:
    """Groups of episodes as they finish; a :class:`~rlhfkit.rollout.collector.GroupStream`."""

    def __init__(self, engine: EpisodeEngineBase, sampling: SamplingSpec, iteration: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._iteration = iteration
        self._make_episode = engine.episode_factory(sampling)
        self._slots = asyncio.Semaphore(engine.concurrency) if engine.concurrency is not None else None
        self._running: list[concurrent.futures.Future[list[Sample]]] = []
        self._finished, self._failed = 0, 0
        self._first_failure: Sample | None = None

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`; raises ``ValueError`` for prompts that are too long."""
        self._engine.check_prompts(prompts)
        iteration = self._iteration if iteration is None else iteration
        self._running += [self._engine.loop.submit(self._group(prompt, iteration)) for prompt in prompts]

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`; raises what ``EpisodeEngineBase.generate`` raises."""
        if not self._running:
            return []
        self._engine.loop.wait(self._running, blocked_after=self._engine.blocked_after, timeout=wait)
        done = [future for future in self._running if future.done()][:most]
        self._running = [future for future in self._running if future not in done]
        try:
            groups = [future.result() for future in done]
        except EngineFailedError as failure:
            if isinstance(failure.__cause__, Exception):
                raise failure.__cause__ from None
            raise
        self._count([sample for group in groups for sample in group])
        return groups

    def close(self) -> None:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`."""
        for future in self._running:
            future.cancel()
        self._running = []
        if self._first_failure is not None:
            message = "iteration %d: %d of %d episodes failed and are not trained on; the first: %s"
            log.warning(message, self._iteration, self._failed, self._finished, describe_failure(self._first_failure))
            self._first_failure = None

    async def _group(self, prompt: Prompt, iteration: int) -> list[Sample]:
        tasks = [
            asyncio.ensure_future(self._run(self._make_episode(prompt, index, iteration=iteration)))
            for index in range(self._sampling.group_size)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # when one fails, the others are not needed
                task.cancel()

    async def _run(self, episode: RunnableEpisode) -> Sample:
        if self._slots is None:
            sample = await episode.run()
        else:
            async with self._slots:
                sample = await episode.run()
        if self._engine.on_error == "raise" and sample.info["failed"]:
            raise EpisodeError(describe_failure(sample)) from episode.error
        return sample

    def _count(self, samples: Sequence[Sample]) -> None:
        """Count failures, and raise if all episodes fail: then the environment itself is broken."""
        failed = [sample for sample in samples if sample.info["failed"]]
        self._finished, self._failed = self._finished + len(samples), self._failed + len(failed)
        self._first_failure = self._first_failure or next(iter(failed), None)
        if self._first_failure is not None and not self._running and self._failed == self._finished > 1:
            first, self._first_failure = self._first_failure, None
            raise EpisodeError(f"all {self._failed} episodes failed, the first: {describe_failure(first)}")


def describe_failure(sample: Sample) -> str:
    """Return which episode failed and how."""
    return (
        f"sample {sample.sample_index} of prompt {sample.prompt.index}, after {sample.info['turns']} turns: "
        f"{sample.info.get('error', sample.info['ended'])}"
    )


def _model_context(engine: RolloutEngine, model: str, trust_remote_code: bool) -> int:
    """Return the context length that an engine can serve."""
    if engine.max_model_len is not None:
        return engine.max_model_len
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return int(config.get_text_config().max_position_embeddings)
