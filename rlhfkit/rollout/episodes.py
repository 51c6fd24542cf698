"""``EpisodeEngine``: an engine whose samples are whole episodes with an environment, played side by side."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from rlhfkit.data.experience import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, check_context
from rlhfkit.rollout.environment import Environment
from rlhfkit.rollout.episode import Episode, EpisodeLimits
from rlhfkit.rollout.event_loop import LoopThread
from rlhfkit.rollout.observations import ObservationTokenizer
from rlhfkit.rollout.turn_sampler import EngineFailedError, TurnSampler
from rlhfkit.rollout.wrapping import EngineWrapper

log = logging.getLogger(__name__)


class EpisodeError(RuntimeError):
    """An environment failed, and this was not to be passed over."""


class EpisodeEngine(EngineWrapper):
    """Plays episodes on another engine: policy and environment take turns until the environment says ``done``.

    Token ids in, token ids out: what the engine sampled is never tokenised again, what the environment says is
    tokenised once and appended, with ``action_mask`` false and log-prob 0. Rewards of single turns are kept in
    ``Sample.token_rewards``; give the callback :class:`~rlhfkit.rewards.EpisodeReward` to train on their sum, or any
    other reward.

    Each turn's randomness is a function of (seed, iteration, prompt, position in the group, turn), so episodes do not
    depend on how many run at the same time, on which engines or ranks.

    How an episode ends, and what becomes of its sample:

    ============================================ ============= ================= ==========
    end (``sample.info["ended"]``)               finish_reason counts as cut off reward
    ============================================ ============= ================= ==========
    ``done``: the environment said so            stop [#]_     no                kept
    ``turns``, ``tokens``: no room for another   length        yes               kept
    ``time``: an episode or a call took too long abort         no                none
    ``error``: the environment raised            abort         no                none
    ============================================ ============= ================= ==========

    .. [#] ``length`` where the last turn itself was cut off at ``SamplingSpec.max_new_tokens``.

    A sample without a reward is not trained on. An environment that raises or hangs loses its own episode alone; if all
    episodes of a call (two at least) do, that is an error.

    Example::

        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), MyEnvironment), reward=EpisodeReward())
        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), tools=[search, calculate]), reward=OnLastTurn(math_match))

    Args:
        engine: What samples the turns.
        environment: Makes an environment: its class, or a function without arguments. Called once per episode.
        tools: Python functions that the policy may call, in place of an environment: see
            :class:`~rlhfkit.rollout.tools.ToolEnvironment`.
        max_turns: Of the policy.
        max_episode_tokens: Prompt, actions and observations together; ``None``: the model's context.
        episode_timeout: Seconds of an episode, generating included.
        environment_timeout: Seconds of each call of the environment.
        concurrency: Episodes at the same time; ``None``: all of a call of :meth:`generate`.
        parallel_calls: Calls of the engine at the same time; ``None``: see
            :class:`~rlhfkit.rollout.turn_sampler.TurnSampler`.
        on_error: ``"raise"``: stop at the first environment that fails.
        chat_template_arguments: Passed to the chat template when observations are chat messages; the same as given to
            ``PromptDataModule``.

    Raises:
        TypeError: If ``engine`` or ``environment`` is none.
        ValueError: If a limit is out of range, or not exactly one of ``environment`` and ``tools`` is given.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Callable[[], Environment] | None = None,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        max_turns: int = 8,
        max_episode_tokens: int | None = None,
        episode_timeout: float = 1800.0,
        environment_timeout: float = 60.0,
        concurrency: int | None = None,
        parallel_calls: int | None = None,
        on_error: Literal["mask", "raise"] = "mask",
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(engine)
        rules: list[tuple[str, Any, bool, str]] = [
            ("max_turns", max_turns, max_turns >= 1, "at least 1"),
            (
                "max_episode_tokens",
                max_episode_tokens,
                max_episode_tokens is None or max_episode_tokens >= 2,
                "None or at least 2",
            ),
            ("episode_timeout", episode_timeout, episode_timeout > 0, "more than 0 seconds"),
            ("environment_timeout", environment_timeout, environment_timeout > 0, "more than 0 seconds"),
            ("concurrency", concurrency, concurrency is None or concurrency >= 1, "None or at least 1"),
            ("parallel_calls", parallel_calls, parallel_calls is None or parallel_calls >= 1, "None or at least 1"),
            ("on_error", on_error, on_error in ("mask", "raise"), "'mask' or 'raise'"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                raise ValueError(f"EpisodeEngine({name}=...) must be {rule}, got {value!r}")
        self.environment = _environment(environment, tools)
        self.max_turns = max_turns
        self.max_episode_tokens = max_episode_tokens
        self.episode_timeout = episode_timeout
        self.environment_timeout = environment_timeout
        self.concurrency = concurrency
        self.parallel_calls = parallel_calls
        self.on_error = on_error
        self.chat_template_arguments = dict(chat_template_arguments or {})
        self._loop = LoopThread("rlhfkit-episodes")
        self._observations: ObservationTokenizer | None = None
        self._context = 0

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Get ready to serve a model; see :meth:`RolloutEngine.start`."""
        super().start(model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=load_weights)
        if self._observations is None:
            from rlhfkit.models.load import load_tokenizer

            tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
            self._observations = ObservationTokenizer(tokenizer, self.chat_template_arguments)
            self._context = model_context(self.engine, model, trust_remote_code=trust_remote_code)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        self._loop.close()
        self._observations = None
        super().close()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Play ``group_size`` episodes from each prompt; see :meth:`RolloutEngine.generate`.

        Raises:
            ValueError: If a prompt leaves no room for an answer.
            EpisodeError: If all environments failed, or one did and ``on_error`` is ``"raise"``.
            BlockedLoopError: If an async environment blocks all others for longer than ``environment_timeout``.
            Exception: Whatever the engine raised.
        """
        if self._observations is None:
            raise RuntimeError("EpisodeEngine.generate was called before EpisodeEngine.start")
        limit = min(self.max_episode_tokens or self._context, self._context)
        check_context(prompts, 1, limit)
        limits = EpisodeLimits(
            turns=self.max_turns, tokens=limit, seconds=self.episode_timeout, call_seconds=self.environment_timeout
        )
        try:
            return self._loop.run(
                lambda: self._play(prompts, sampling, iteration, limits),
                blocked_after=self.environment_timeout + 5.0,
            )
        except EngineFailedError as failure:
            if isinstance(failure.__cause__, Exception):
                raise failure.__cause__ from None
            raise

    async def _play(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int, limits: EpisodeLimits
    ) -> list[Sample]:
        """All episodes of a call."""
        sampler = TurnSampler(self.engine, parallel_calls=self.parallel_calls)
        episodes = [
            Episode(
                prompt,
                index,
                environment=self.environment,
                sampler=sampler,
                observations=self._observations,  # type: ignore[arg-type]  # generate() has checked
                limits=limits,
                sampling=sampling,
                iteration=iteration,
            )
            for prompt in prompts
            for index in range(sampling.group_size)
        ]
        places = asyncio.Semaphore(self.concurrency or max(1, len(episodes)))

        async def play(episode: Episode) -> Sample:
            async with places:
                sample = await episode.play()
            if self.on_error == "raise" and sample.info["failed"]:
                raise EpisodeError(_which(sample)) from episode.error
            return sample

        tasks = [asyncio.ensure_future(play(episode)) for episode in episodes]
        try:
            samples = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # when one fails, nobody waits for the others
                task.cancel()
        report_failures(samples, iteration)
        return samples


def _environment(environment: Any, tools: Sequence[Callable[..., Any]]) -> Callable[[], Environment]:
    """Whatever makes environments."""
    if (environment is None) != bool(tools):
        raise ValueError("EpisodeEngine takes an environment or tools, one of the two")
    if environment is None:
        from rlhfkit.rollout.tools import ToolEnvironment, ToolEnvironmentFactory

        ToolEnvironment(tools)  # its errors are raised here and now
        return ToolEnvironmentFactory(tools)
    if isinstance(environment, Environment) or not callable(environment):
        raise TypeError(
            "environment must be a class or a function that makes a new Environment for each episode, got "
            f"{environment!r}"
        )
    return environment


def model_context(engine: RolloutEngine, model: str, *, trust_remote_code: bool = False) -> int:
    """Tokens of prompt and completion that an engine can serve.

    Args:
        engine: Its ``max_model_len`` counts, if it has one.
        model: Folder or hub name.
        trust_remote_code: Passed to Transformers.
    """
    limit = getattr(engine, "max_model_len", None)
    if limit is not None:
        return int(limit)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    return int(config.get_text_config().max_position_embeddings)


def report_failures(samples: Sequence[Sample], iteration: int) -> None:
    """Say how many episodes failed and how the first did.

    Args:
        samples: Whose ``info`` says so.
        iteration: For the message.

    Raises:
        EpisodeError: If all of them failed, and there is more than one.
    """
    failed = [sample for sample in samples if sample.info["failed"]]
    if not failed:
        return
    message = f"{len(failed)} of {len(samples)} episodes failed, the first: {_which(failed[0])}"
    if len(failed) == len(samples) > 1:
        raise EpisodeError(message)
    log.warning("iteration %d: %s; they are not trained on", iteration, message)


def _which(sample: Sample) -> str:
    """Which episode failed and how."""
    return (
        f"sample {sample.sample_index} of prompt {sample.prompt.index}, after {sample.info['turns']} turns: "
        f"{sample.info.get('error', sample.info['ended'])}"
    )
