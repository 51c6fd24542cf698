"""Group functions: the samples of a prompt are what an async function returns.

``RolloutCallback(group=f)`` with ``async def f(prompt, size, sampler) -> list[Sample]``. The functions of all prompts
run together in one event loop, and what they ask for at the same time becomes one call of the engine. Seeds, texts,
masks and lengths are the business of the :class:`GroupSampler`: samples do not depend on ranks, engines, or on which
function runs first.
"""

import concurrent.futures
import dataclasses
import hashlib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhfkit.data.types import OTHER_MODEL, PerToken, Prompt, Sample
from rlhfkit.rollout.collector import sample_all, with_texts
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, sample_seed
from rlhfkit.rollout.errors import RequestError
from rlhfkit.rollout.event_loop import EventLoopThread, run_in_thread
from rlhfkit.rollout.request_batcher import EngineFailedError, RequestBatcher, Requesters, request_index

log = logging.getLogger(__name__)


_OF_A_REQUEST = ("group_size", "max_new_tokens", "stop", "stop_token_ids")
"""Fields of a SamplingSpec that requests of a run may have each their own of."""


class GroupError(RuntimeError):
    """A group function returned no group, or all of the samples that it made are failures."""


class GroupFunction:
    """Base class of group functions that have state, or are a part of the task. A plain async function needs none.

    An object of a subclass is given as ``RolloutCallback(group=...)``; one object serves all prompts of a rank.
    """

    in_validation: bool = False
    """Whether validation, and the greedy answers of ReMax, are made by it too, as for episodes with an environment.
    Otherwise they are single completions of the policy, so that hints and other help do not improve a score. A plain
    function may have the attribute as well."""
    shortens_answers: bool = False
    """Whether prompts need room for one token only, as completions are limited to the room that is left."""
    blocked_after: float = 65.0
    """Seconds that one step of its code may block the event loop before that is an error."""
    parallel_calls: int | None = None
    """Concurrent calls of the engine; ``None``: see :class:`~rlhfkit.rollout.request_batcher.RequestBatcher`."""
    max_model_len: int | None = None
    """Maximum tokens of prompt and completion; ``None``: the engine's."""

    async def __call__(self, prompt: Prompt, size: int, sampler: "GroupSampler") -> list[Sample]:
        """Return the samples of a prompt, ``size`` of them unless the algorithm takes others. Abstract."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__()")

    @property
    def engines(self) -> Sequence[RolloutEngine]:
        """Engines besides the policy's, such as a reference's: they sleep, wake and close with it."""
        return ()

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise TypeError or ValueError if the function cannot work with the policy's engine."""

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer, and what its chat template is given; called before anything is loaded."""

    def start(self, engine: RolloutEngine, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        """Start :attr:`engines`; called whenever the policy's engine is started, which may be often."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""


AnyGroupFunction = Callable[[Prompt, int, "GroupSampler"], Awaitable[list[Sample]]]
"""``async def group(prompt, size, sampler)``, or an object of a :class:`GroupFunction`."""


class _PlainFunction(GroupFunction):
    """A user's function."""

    def __init__(self, function: AnyGroupFunction) -> None:
        if not callable(function):
            raise TypeError(f"group must be an async function of (prompt, size, sampler), got {function!r}")
        if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(f"group must be async: write `async def {name}(prompt, size, sampler)`")
        self._function = function
        self.in_validation = bool(getattr(function, "in_validation", False))

    async def __call__(self, prompt: Prompt, size: int, sampler: "GroupSampler") -> list[Sample]:
        return await self._function(prompt, size, sampler)


class GroupSampler:
    """What the function of one prompt makes its samples with.

    The samples of a request are a function of the run's seed, the iteration, the prompt and the request itself
    (``attempt``, or the tokens that are continued). The same request again gives other samples.
    """

    def __init__(self, stream: "GroupFunctionStream", prompt: Prompt, iteration: int, own: ExitStack) -> None:
        self.prompt = prompt
        self.iteration = iteration
        self._stream = stream
        self._sampling = stream.sampling
        self._repeats: dict[Any, int] = {}
        self._own = own  # in which the function itself counts among those who send requests
        self.scored: list[list[Sample]] = []

    @property
    def sampling(self) -> SamplingSpec:
        """How to sample; ``group_size`` is the size that the function is asked for.

        A function may set it for what it asks next: other lengths and stops, such as those of a row of the data, and
        another temperature if the module weighs samples by the engine's log-probs.

        Raises:
            ValueError: If it is set to what the trainer or the engine would take for the run's.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: SamplingSpec) -> None:
        run, weighed = self._stream.sampling, self._stream.runner.weighed
        free = {*_OF_A_REQUEST, *(["temperature"] if weighed else [])}
        names = [each.name for each in dataclasses.fields(run) if each.name not in free]
        changed = [name for name in names if getattr(sampling, name) != getattr(run, name)]
        if changed == ["temperature"]:
            raise ValueError(
                f"samples at temperature {sampling.temperature:g} are not those of the policy that learns, whose "
                f"log-probs are at the run's {run.temperature:g}: give the module a Correction, which weighs them, or "
                "change the temperature of whole iterations by a RolloutPart"
            )
        if changed:
            raise ValueError(
                f"a group function may not set {', '.join(changed)}, which engines are prepared for before the run: "
                f"give them in RolloutCallback(sampling=...); it may set {', '.join(_OF_A_REQUEST)}"
            )
        self._sampling = sampling

    @property
    def engine(self) -> RolloutEngine:
        """The policy's engine."""
        return self._stream.runner.engine

    @property
    def version(self) -> int:
        """Policy version of the weights that the engine serves now."""
        return self.engine.version or 0

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return self._stream.runner.tokenizer

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of prompt and completion: those that the engine can serve."""
        return self._stream.runner.context

    # ------------------------------------------------------------------ samples

    async def sample(
        self, prompt: Prompt, count: int, *, attempt: int = 0, hint: str = "", engine: RolloutEngine | None = None
    ) -> list[Sample]:
        """Sample completions of the prompt.

        Args:
            prompt: The prompt of the function, or a copy with other ``token_ids``.
            count: Number of completions.
            attempt: Goes into the seeds; 0 gives the samples that a run without a group function has.
            hint: Text behind the prompt that is read and not trained on. It stays in the ``prompt`` of these samples,
                so that the trainer computes what the engine has sampled.
            engine: Another engine than the policy's. Its tokens have the version
                :data:`~rlhfkit.data.types.OTHER_MODEL` and no log-probs (NaN), which no correction weighs: they are for
                modules that compare answers.
        """
        if hint:
            ids = self.tokenizer.encode(hint, add_special_tokens=False)
            prompt = dataclasses.replace(prompt, token_ids=_joined(prompt.token_ids, ids))
        repeat = self._repeat(("sample", attempt, id(engine)))
        first = attempt == 0 and repeat == 0
        index = prompt.index if first else request_index(prompt.index, "sample", attempt, repeat)
        return await self._ask(prompt, prompt.token_ids, index, count, self.sampling.max_new_tokens, engine)

    async def continue_(self, sample: Sample, count: int, *, trained: bool = False) -> list[Sample]:
        """Sample continuations of a sample. They begin with its tokens, which are not trained on.

        Args:
            sample: What is continued; :meth:`cut` it before, if it has ended.
            count: Number of continuations.
            trained: Train on the tokens of ``sample`` too, as far as the policy chose them: for conversations.

        Raises:
            ValueError: If ``SamplingSpec.max_new_tokens``, which counts all tokens of a sample, leaves no room.
        """
        stem = sample.token_ids
        room = self.sampling.max_new_tokens - len(stem)
        if room < 1:
            raise ValueError(
                f"the sample has {len(stem)} tokens, and SamplingSpec(max_new_tokens={self.sampling.max_new_tokens}) "
                "leaves no room to continue it: cut() it before, or raise max_new_tokens"
            )
        context = sample.all_token_ids
        tails = await self._ask(sample.prompt, context, self.context_index(context), count, room, None)
        mask = sample.chosen if trained else np.zeros(len(stem), np.bool_)
        logprobs = sample.logprobs if trained else np.zeros(len(stem), np.float32)
        return self.with_texts(
            dataclasses.replace(
                tail,
                token_ids=_joined(stem, tail.token_ids),
                logprobs=_joined(logprobs, tail.logprobs),
                versions=_joined(sample.versions, tail.versions),
                action_mask=_joined(mask, [True] * tail.num_tokens),
            )
            for tail in tails
        )

    def append(self, sample: Sample, text: str) -> Sample:
        """Return a sample with a text behind it that the policy reads and is not trained on, as a tool's answer."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        longer = dataclasses.replace(
            sample,
            token_ids=_joined(sample.token_ids, ids),
            logprobs=_joined(sample.logprobs, [0.0] * len(ids)),
            versions=_joined(sample.versions, [self.version] * len(ids)),
            action_mask=_joined(sample.chosen, [False] * len(ids)),
            token_rewards=None if sample.token_rewards is None else _joined(sample.token_rewards, [0.0] * len(ids)),
        )
        return self.with_texts([longer])[0]

    def cut(self, sample: Sample, length: int) -> Sample:
        """Return the first ``length`` tokens of a sample, which count as cut off (``finish_reason="length"``)."""
        if not 0 <= length <= sample.num_tokens:
            raise ValueError(f"a sample of {sample.num_tokens} tokens cannot be cut to {length}")
        mask, rewards = sample.action_mask, sample.token_rewards
        shorter = dataclasses.replace(
            sample,
            token_ids=sample.token_ids[:length],
            logprobs=sample.logprobs[:length],
            versions=sample.versions[:length],
            finish_reason="length",
            action_mask=None if mask is None else mask[:length],
            token_rewards=None if rewards is None else rewards[:length],
            reward=None,
            reward_parts={},
        )
        return self.with_texts([shorter])[0]

    def given(self, prompt: Prompt, text: str) -> Sample:
        """Return a completion that was written by somebody else, with the end-of-sequence token.

        Its tokens have the version :data:`~rlhfkit.data.types.OTHER_MODEL` and no log-probs (NaN).
        """
        end = self.tokenizer.eos_token_id
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), *([] if end is None else [end])]
        nothing = [math.nan] * len(ids)
        return self.with_texts([Sample(prompt, 0, ids, nothing, [OTHER_MODEL] * len(ids), "stop")])[0]

    async def score(self, samples: Sequence[Sample]) -> list[float | None]:
        """Let the run's reward score samples, in place, and return their rewards.

        A group that is returned as it was scored is not scored again.
        """
        scored = list(samples)
        await run_in_thread(self._stream.runner.score, scored)
        self.scored.append(scored)
        return [sample.reward for sample in scored]

    # ------------------------------------------------------------------ for functions of many turns

    async def ask(self, prompt: Prompt, sampling: SamplingSpec, *, engine: RolloutEngine | None = None) -> list[Sample]:
        """Send one request as it is: nothing is added to its context, seeds or lengths.

        ``prompt.index`` goes into the seeds; see :func:`~rlhfkit.rollout.request_batcher.request_index`. Raises
        :class:`~rlhfkit.rollout.errors.RequestError` if the engine refuses it.
        """
        return await self._stream.batcher(engine).ask(prompt, sampling, iteration=self.iteration)

    def context_index(self, context: PerToken) -> int:
        """Return what goes into the seeds of a request in place of the prompt's index; other for each repetition."""
        digest = hashlib.blake2b(repr(np.asarray(context).tolist()).encode(), digest_size=8).hexdigest()
        return request_index(self.prompt.index, digest, self._repeat(digest))

    def leave_to_branches(self) -> None:
        """Say that only coroutines inside :meth:`branch` will send requests; else the function counts as one more."""
        self._own.close()

    def branch(self) -> AbstractContextManager[None]:
        """Context of one of several coroutines that send requests side by side, each one at a time.

        A call of an engine in this process waits a moment for all that are about to ask.
        """
        return self._stream.requesters.one_more()

    def with_texts(self, samples: Any) -> list[Sample]:
        """Set the texts of samples, and return the samples."""
        return with_texts(list(samples), self.tokenizer)

    # ------------------------------------------------------------------ internals

    def _repeat(self, request: Any) -> int:
        self._repeats[request] = self._repeats.get(request, -1) + 1
        return self._repeats[request]

    async def _ask(
        self,
        prompt: Prompt,
        context: PerToken,
        index: int,
        count: int,
        max_new_tokens: int,
        engine: RolloutEngine | None,
    ) -> list[Sample]:
        room = min(max_new_tokens, self.max_tokens - len(context))
        if room < 1:
            raise RequestError(
                f"prompt {prompt.index} has {len(context)} tokens with what its group function adds, and the context "
                f"is {self.max_tokens}: shorten it, or the prompts (PromptDataModule(max_prompt_length=...))"
            )
        spec = dataclasses.replace(
            self.sampling,
            group_size=count,
            max_new_tokens=room,
            min_new_tokens=min(self.sampling.min_new_tokens, room),
        )
        if engine is not None:  # with the policy's seeds equal models would give equal answers
            spec = dataclasses.replace(spec, seed=sample_seed(spec.seed, OTHER_MODEL, OTHER_MODEL, OTHER_MODEL))
        samples = await self.ask(dataclasses.replace(prompt, index=index, token_ids=context), spec, engine=engine)
        for sample in samples:
            sample.prompt = prompt
            if engine is not None:
                sample.versions = [OTHER_MODEL] * sample.num_tokens
                sample.logprobs = [math.nan] * sample.num_tokens
        return self.with_texts(samples)


def _joined(values: PerToken, more: PerToken) -> PerToken:
    """Numbers per token, one after the other; a list takes the type of the array before it."""
    return np.concatenate([values, np.asarray(more, dtype=values.dtype if isinstance(more, list) else None)])


class GroupRunner:
    """Runs the group functions of one process. It stands where an engine does for whoever collects groups.

    Args:
        engine: The policy's.
        group: The function.

    Raises:
        TypeError: If ``group`` is not an async function, or cannot work with the engine.
    """

    def __init__(self, engine: RolloutEngine, group: AnyGroupFunction) -> None:
        self.engine = engine
        self.function = group if isinstance(group, GroupFunction) else _PlainFunction(group)
        self.function.check_engine(engine)
        self.shared, self.continuous_batching, self.recorded = (
            engine.shared,
            engine.continuous_batching,
            engine.recorded,
        )
        self.can_stream = not engine.recorded
        """Whether groups are returned as their functions return: not those of an earlier run."""
        self.weighed = True
        """Whether samples of another distribution than the policy's are weighed by the engine's log-probs."""
        self.loop = EventLoopThread("rlhfkit-groups")
        self.score: Callable[[list[Sample]], None] = _no_reward
        """Sets the rewards of samples, in place; called in any thread."""
        self.tokenizer: Any = None
        self._model: tuple[str, bool] = ("", False)
        self._context: int | None = None
        self._scored: dict[int, Sample] = {}  # by id: those that need no other score

    def __reduce__(self) -> Any:
        """Pickle without the loop and what belongs to a run, for ranks in other processes (on Ray)."""
        return type(self), (self.engine, self.function)

    @property
    def shortens_answers(self) -> bool:
        return self.function.shortens_answers or self.engine.shortens_answers

    @property
    def max_model_len(self) -> int | None:
        """Maximum tokens of prompt and completion; ``None``: the model's context."""
        lengths = [self.function.max_model_len, *(one.max_model_len for one in (self.engine, *self.function.engines))]
        return min((length for length in lengths if length is not None), default=None)

    def resume_problem(self, sampling: SamplingSpec) -> str | None:
        return "a group function that has begun cannot be stopped and continued"

    def configure(
        self,
        tokenizer: Any,
        chat_template_kwargs: Mapping[str, Any] | None,
        model: str,
        *,
        trust_remote_code: bool = False,
        score: Callable[[list[Sample]], None] | None = None,
    ) -> None:
        """Take the run's tokenizer, model and reward; before anything is loaded."""
        self.score = score or _no_reward
        self.tokenizer, self._model, self._context = tokenizer, (model, trust_remote_code), None
        self.function.configure_tokenizer(tokenizer, chat_template_kwargs)

    @property
    def context(self) -> int:
        if self._context is None:
            limit = self.max_model_len
            if limit is None:
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(self._model[0], trust_remote_code=self._model[1])
                limit = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31)
            self._context = limit
        return self._context

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "GroupFunctionStream":
        """Open a stream of groups; see :class:`~rlhfkit.rollout.collector.StreamingEngine`."""
        if self.tokenizer is None:
            raise RuntimeError("a group function was asked for samples before RolloutCallback.setup")
        return GroupFunctionStream(self, sampling, iteration)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Return the groups of all prompts, in order.

        Raises:
            GroupError: If all samples failed.
            BlockedLoopError: If async code blocks the event loop.
            Exception: Any exception of the function or the engine.
        """
        if self.engine.recorded:
            return self.engine.generate(prompts, sampling, iteration=iteration)
        return sample_all(self.stream(sampling, iteration=iteration), prompts)

    def keep_scored(self, samples: Sequence[Sample]) -> None:
        """Remember samples that the function has scored already."""
        self._scored |= {id(sample): sample for sample in samples}

    def unscored(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples that the function has not scored; each is asked for once."""
        return [sample for sample in samples if self._scored.pop(id(sample), None) is None]

    def close(self) -> None:
        """End the event loop and free what the function has; a second call does nothing."""
        self.loop.close()
        self.function.close()
        self._scored.clear()
        self.score = _no_reward


def _no_reward(samples: list[Sample]) -> None:
    raise RuntimeError("sampler.score() needs RolloutCallback(reward=...)")


class GroupFunctionStream:
    """Groups as their functions return; a :class:`~rlhfkit.rollout.collector.GroupStream`."""

    def __init__(self, runner: GroupRunner, sampling: SamplingSpec, iteration: int) -> None:
        self.runner = runner
        self.sampling = sampling
        self.requesters = Requesters()
        self._iteration = iteration
        self._batchers: dict[int, RequestBatcher] = {}
        self._running: dict[concurrent.futures.Future[tuple[list[Sample], bool]], int] = {}  # by iteration
        self._finished: Counter[int] = Counter()  # samples by iteration, as those below
        self._failed: dict[int, list[Sample]] = {}

    def batcher(self, engine: RolloutEngine | None) -> RequestBatcher:
        """Return what collects the requests to an engine; ``None``: the policy's."""
        engine = engine or self.runner.engine
        if id(engine) not in self._batchers:
            calls = self.runner.function.parallel_calls
            self._batchers[id(engine)] = RequestBatcher(engine, parallel_calls=calls, requesters=self.requesters)
        return self._batchers[id(engine)]

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        iteration = self._iteration if iteration is None else iteration
        works = [partial(self._group, prompt, iteration) for prompt in prompts]
        self._running |= dict.fromkeys(self.runner.loop.submit_together(works), iteration)

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """See :class:`~rlhfkit.rollout.collector.GroupStream`; raises what :meth:`GroupRunner.generate` raises."""
        if not self._running:
            return []
        self.runner.loop.wait([*self._running], blocked_after=self.runner.function.blocked_after, timeout=wait)
        done = [future for future in self._running if future.done()][:most]
        iterations = [self._running.pop(future) for future in done]
        try:
            made = [future.result() for future in done]
        except EngineFailedError as failure:
            if isinstance(failure.__cause__, Exception):
                raise failure.__cause__ from None
            raise
        for group, scored in made:
            if scored:
                self.runner.keep_scored(group)
        for (group, _), iteration in zip(made, iterations, strict=True):
            self._finished[iteration] += len(group)
            self._failed.setdefault(iteration, []).extend(sample for sample in group if sample.info.get("failed"))
        for iteration in sorted({*iterations}):
            self._check_failures(iteration)
        return [group for group, _ in made]

    def close(self) -> None:
        for future in self._running:
            future.cancel()
        self._running = {}
        self._report_failures(math.inf)

    async def _group(self, prompt: Prompt, iteration: int) -> tuple[list[Sample], bool]:
        """Return a group, and whether it was scored as it is."""
        with ExitStack() as own:
            own.enter_context(self.requesters.one_more())
            sampler = GroupSampler(self, prompt, iteration, own)
            try:
                made = await self.runner.function(prompt, self.sampling.group_size, sampler)
            except EngineFailedError:
                raise
            except Exception as error:
                error.add_note(f"raised by the group function for prompt {prompt.index}")
                raise
        group = _checked(prompt, made)
        ids = {id(sample) for sample in group}
        return group, any({id(sample) for sample in scored} == ids for scored in sampler.scored)

    def _check_failures(self, iteration: int) -> None:
        """Raise if all samples of an iteration are failures, as then the environment itself is broken."""
        failed = self._failed[iteration]
        if iteration not in self._running.values() and len(failed) == self._finished[iteration] > 1:
            del self._failed[iteration]
            raise GroupError(f"all {len(failed)} episodes failed, the first: {describe_failure(failed[0])}")
        self._report_failures(iteration)

    def _report_failures(self, before: float) -> None:
        for iteration in sorted(number for number in self._failed if number < before):
            if failed := self._failed.pop(iteration):
                message = "iteration %d: %d of %d episodes failed and are not trained on; the first: %s"
                log.warning(message, iteration, len(failed), self._finished[iteration], describe_failure(failed[0]))


def _checked(prompt: Prompt, made: Any) -> list[Sample]:
    """Number the samples of a group; raises GroupError if it is none."""
    if not isinstance(made, list | tuple) or not all(isinstance(sample, Sample) for sample in made):
        raise GroupError(f"the group function returned {type(made).__name__} for prompt {prompt.index}, not samples")
    if not made:
        raise GroupError(
            f"the group function returned no sample for prompt {prompt.index}: return at least one, such as the best; "
            "to learn nothing from a prompt let its rewards be equal, or use DynamicSampling"
        )
    others = {sample.prompt.index for sample in made} - {prompt.index}
    if others:
        raise GroupError(f"the group function for prompt {prompt.index} returned samples of prompt {min(others)}")
    group: list[Sample] = []
    seen: set[int] = set()
    for place, sample in enumerate(made):
        if id(sample) in seen:  # the same one twice
            sample = dataclasses.replace(sample)
        seen.add(id(sample))
        sample.sample_index = place
        group.append(sample)
    return group


def describe_failure(sample: Sample) -> str:
    """Return which sample failed and how."""
    turns = sample.info.get("turns", 0)
    why = sample.info.get("error", sample.info.get("ended", "failed"))
    return f"sample {sample.sample_index} of prompt {sample.prompt.index}, after {turns} turns: {why}"


def sample_groups(
    engine: RolloutEngine,
    group: AnyGroupFunction,
    prompts: Sequence[Prompt],
    sampling: SamplingSpec,
    *,
    model: str,
    tokenizer: Any = None,
    iteration: int = 0,
) -> list[Sample]:
    """Run a group function outside of training, on an engine that was started; for scripts and tests of functions.

    Args:
        engine: Serves the weights.
        group: See :data:`AnyGroupFunction`.
        prompts: What to sample.
        sampling: How.
        model: Folder or hub name that the engine was started with.
        tokenizer: ``None``: the model's.
        iteration: Goes into the seeds.

    Returns:
        The samples of all prompts, in order.
    """
    from rlhfkit.models.load import load_tokenizer

    runner = GroupRunner(engine, group)
    try:
        runner.configure(load_tokenizer(model) if tokenizer is None else tokenizer, None, model)
        return runner.generate(prompts, sampling, iteration=iteration)
    finally:
        runner.close()
