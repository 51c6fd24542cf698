"""``Episodes``: a group function whose samples are episodes with an environment; ``Episode``: one of them."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.episodes.base import EpisodeGroups
from rlhfkit.episodes.environment import Action, Environment, Observation, Step
from rlhfkit.episodes.observations import ObservationTokenizer, is_conversation
from rlhfkit.episodes.tool_calls import ToolCallParser, template_parser
from rlhfkit.episodes.tools import ToolEnvironment
from rlhfkit.episodes.trajectory import Trajectory
from rlhfkit.rollout.engine import check_context
from rlhfkit.rollout.event_loop import call_with_timeout
from rlhfkit.rollout.groups import GroupSampler
from rlhfkit.rollout.request_batcher import EngineFailedError, request_index
from rlhfkit.validation import check_number

EndReason = Literal["done", "turns", "tokens", "time", "error"]
"""Why an episode ended; the table in :class:`~rlhfkit.episodes.Episodes` explains each."""

FINISH_REASONS: dict[EndReason, FinishReason] = {
    "done": "stop",
    "turns": "length",
    "tokens": "length",
    "time": "abort",
    "error": "abort",
}
"""``Sample.finish_reason`` for each way an episode can end."""


class Episodes(EpisodeGroups):
    """A sample is an episode: policy and environment alternate until the environment says ``done``.

    Sampled tokens are never tokenised again; an observation is tokenised once and appended, with ``action_mask`` false
    and log-prob 0. ``Sample.token_rewards`` has the rewards of single turns;
    :class:`~rlhfkit.rewards.EnvironmentReward` trains on their sum, any other reward is possible too.

    The random seed of a turn is a function of (seed, iteration, prompt, index in the group, turn), so episodes do not
    depend on concurrency, engines or ranks.

    How an episode ends, and its sample:

    ============================================ ============= ================= ==========
    end (``sample.info["ended"]``)               finish_reason truncated         reward
    ============================================ ============= ================= ==========
    ``done``: the environment said so            stop [#]_     no                kept
    ``turns``, ``tokens``: a limit was reached   length        yes               kept
    ``time``: an episode or a call took too long abort         no                none
    ``error``: the environment raised            abort         no                none
    ============================================ ============= ================= ==========

    .. [#] ``length`` where the last turn itself was truncated at ``SamplingSpec.max_new_tokens``.

    A sample without a reward is not trained on. An environment that raises or hangs loses only its own episode; it is
    an error if all episodes of an iteration (at least two) fail. Validation runs episodes too.

    Example::

        RolloutCallback(engine=VLLMPool(2), group=Episodes(MyEnvironment), reward=EnvironmentReward())
        RolloutCallback(
            engine=VLLMPool(2), group=Episodes(tools=[search, calculate]), reward=LastTurnReward(math_match)
        )

    Args:
        environment: Environment class, or a function without arguments that creates one; called once per episode.
        tools: Python functions that the policy may call, instead of an environment; see
            :class:`~rlhfkit.episodes.tools.ToolEnvironment`.
        tool_call_parser: How the policy writes calls of ``tools``: ``hermes``, ``llama3_json``, ``mistral``,
            ``deepseek``, ``qwen_xml``, ``pythonic``, or a function; ``None``: as the model's chat template shows,
            ``hermes`` if it shows none.
        max_turns: Turns of the policy per episode.
        max_episode_tokens: Prompt, actions and observations together; ``None``: the model's context.
        episode_timeout: Time limit of an episode in seconds, generation included.
        environment_timeout: Time limit in seconds of each call of the environment.
        concurrency: Concurrent episodes of each rank; ``None``: all that are wanted.
        parallel_calls: Concurrent calls of the engine; ``None``: see
            :class:`~rlhfkit.rollout.request_batcher.RequestBatcher`.
        on_error: ``"mask"``: a failed episode is not trained on; ``"raise"``: stop at the first one.
        chat_template_kwargs: Passed to the chat template for observations that are chat messages; ``None``: those of
            the DataModule. Others than its are an error.

    Raises:
        TypeError: If ``environment`` has the wrong type.
        ValueError: If a limit is out of range, or not exactly one of ``environment`` and ``tools`` is given.
    """

    def __init__(
        self,
        environment: Callable[[], Environment] | None = None,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        tool_call_parser: str | ToolCallParser | None = None,
        max_turns: int = 8,
        max_episode_tokens: int | None = None,
        episode_timeout: float = 1800.0,
        environment_timeout: float = 60.0,
        concurrency: int | None = None,
        parallel_calls: int | None = None,
        on_error: Literal["mask", "raise"] = "mask",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("environment_timeout", environment_timeout, above=0, why="it is in seconds")
        super().__init__(
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            episode_timeout=episode_timeout,
            blocked_after=environment_timeout + 5.0,
            concurrency=concurrency,
            parallel_calls=parallel_calls,
            on_error=on_error,
            chat_template_kwargs=chat_template_kwargs,
        )
        self.environment = _environment(environment, tools, tool_call_parser)
        self._tools = [] if tool_call_parser is not None else list(tools)  # whose parser the template decides
        self.environment_timeout = environment_timeout
        self.observations: ObservationTokenizer | None = None

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer and template.

        Raises:
            ValueError: If it was given other arguments of the template than prompts have.
        """
        own, theirs = self.chat_template_kwargs, chat_template_kwargs
        if own is not None and theirs is not None:
            # Tools are written at the start of a conversation, which is the DataModule's.
            names = sorted(name for name in {*own, *theirs} - {"tools"} if own.get(name) != theirs.get(name))
            if names:
                raise ValueError(
                    f"the DataModule and {type(self).__name__} give the chat template other chat_template_kwargs "
                    f"({', '.join(names)}), so that the turns of an episode would differ from its prompt: give them to "
                    "the DataModule alone, whose are used for episodes too"
                )
        self.observations = ObservationTokenizer(tokenizer, dict(theirs or {}) if own is None else own)
        if self._tools:
            self.environment = partial(ToolEnvironment, self._tools, tool_call_parser=template_parser(tokenizer))

    def close(self) -> None:
        """Forget the tokenizer; a second call does nothing."""
        self.observations = None

    def episode(self, prompt: Prompt, sample_index: int, sampler: GroupSampler) -> "Episode":
        """Return an episode; raises ValueError if the prompt leaves no room for a completion."""
        check_context([prompt], 1, sampler.max_tokens)
        if self.observations is not None:
            self.observations.use_images(sampler.engine.image_processor)
        return Episode(prompt, sample_index, self, sampler)


def _environment(
    environment: Any, tools: Sequence[Callable[..., Any]], parser: str | ToolCallParser | None
) -> Callable[[], Environment]:
    """Return a function that creates environments."""
    if (environment is None) != bool(tools):
        raise ValueError("Episodes takes either an environment or tools")
    if environment is None:
        with_tools = partial(ToolEnvironment, list(tools), tool_call_parser=parser or "hermes")
        with_tools()  # raises if the tools are invalid
        return with_tools
    if parser is not None:
        raise ValueError("tool_call_parser finds calls of tools: give tools, or leave it out beside an environment")
    if isinstance(environment, Environment) or not callable(environment):
        raise TypeError(
            "environment must be a class or a function that makes a new Environment for each episode, got "
            f"{environment!r}"
        )
    made: Callable[[], Environment] = environment
    return made


class Episode:
    """One episode of ``settings``, with the given index in a prompt's group."""

    def __init__(self, prompt: Prompt, sample_index: int, settings: Episodes, sampler: GroupSampler) -> None:
        assert settings.observations is not None  # configured by who calls
        self.prompt = prompt
        self.sample_index = sample_index
        self.settings = settings
        self.sampler = sampler
        self.observations = settings.observations
        self.sampling = dataclasses.replace(sampler.sampling, group_size=1)
        self.error: Exception | None = None
        """The exception that ended the episode early."""
        self._trajectory = Trajectory(prompt, sample_index)
        self._environment: Environment | None = None
        self._arguments: dict[str, Any] = {}  # of the chat template, for the row of the prompt
        self._steps: list[dict[str, Any]] = []
        self._scored = True  # no reward was None
        self._environment_seconds = 0.0

    async def run(self) -> Sample:
        """Run the episode to its end and return the sample; raises :class:`EngineFailedError` if the engine failed.

        Its ``info`` has ``reward`` (``None`` after an error or timeout), ``ended`` (:data:`EndReason`), ``turns``,
        ``failed``, ``environment_tokens``, ``environment_seconds``, ``last_text``, ``steps``, and after an error
        ``error``.
        """
        self._deadline = time.monotonic() + self.settings.episode_timeout
        ended: EndReason = "error"
        try:
            ended = await self._turns()
        except EngineFailedError:
            raise
        except TimeoutError as error:
            ended, self.error = "time", error
        except Exception as error:  # raised by the environment, or because of what it returned
            self.error = error
        finally:
            await self._close()
        return self._sample(ended)

    async def _turns(self) -> EndReason:
        self._arguments = self.observations.row_arguments(self.prompt)
        environment = await self._call_environment(self.settings.environment, "making the environment")
        self._environment = environment
        self._apply_reset(await self._call_environment(environment.reset, "reset()", self.prompt))
        for turn in range(self.settings.max_turns):
            room = self.sampler.max_tokens - len(self._trajectory.context)
            if room < 1:
                return "tokens"
            action = await self._sample_action(turn, room)
            step = await self._call_environment(environment.step, "step()", action)
            if not isinstance(step, Step):
                raise TypeError(f"step() must return a Step, got {type(step).__name__}")
            self._record_reward(step)
            if step.done:
                return "done"
            if turn + 1 < self.settings.max_turns and not self._append_observation(step.observation):
                return "tokens"
        return "turns"

    def _apply_reset(self, observation: Observation | None) -> None:
        """Start the trajectory with the observation of ``reset()``."""
        if observation is None:
            return
        if is_conversation(observation):
            observation = self.observations.opened(observation)
            token_ids = self.observations.encode_conversation(observation, **self._arguments)  # type: ignore[arg-type]  # checked
            images = self.observations.images_of(observation)
            self._trajectory.prompt = dataclasses.replace(self.prompt, token_ids=token_ids, attachments=images)
        else:
            self._trajectory.add_observation(self.observations.encode_observation(observation), self.sampler.version)

    async def _sample_action(self, turn: int, room: int) -> Action:
        """Sample one turn of the policy, of at most ``room`` tokens."""
        spec = self.sampling
        most = min(spec.max_new_tokens, room)
        if most < spec.max_new_tokens:
            spec = dataclasses.replace(spec, max_new_tokens=most, min_new_tokens=min(spec.min_new_tokens, most))
        index = request_index(self.prompt.index, self.sample_index, turn)
        request = Prompt(index, self._trajectory.context, attachments=self._trajectory.attachments)
        (sampled,) = await call_with_timeout(
            partial(self.sampler.ask, request, spec),
            timeout=self._seconds_left(),
            description=f"the episode (limit: {self.settings.episode_timeout:g} s), generating in turn {turn},",
        )
        self._trajectory.add_action(sampled)
        tokenizer = self.observations.tokenizer
        text = tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        raw_text = tokenizer.decode(sampled.token_ids, skip_special_tokens=False)
        return Action(turn, sampled.token_ids.tolist(), text, raw_text, sampled.finish_reason)

    def _record_reward(self, step: Step) -> None:
        self._steps.append(dict(step.info))
        if step.reward is None:
            self._scored = False
        else:
            self._trajectory.add_reward(float(step.reward))

    def _append_observation(self, observation: Observation | None) -> bool:
        """Append the observation of ``step()``; return false if that would leave no room for another turn."""
        if observation is None:
            raise ValueError(
                "step() returned neither an observation nor done=True: return one of them (an observation may be "
                "an empty text)"
            )
        last, observation = self._trajectory.last_action, self.observations.opened(observation)
        token_ids = self.observations.encode_observation(observation, last, **self._arguments)
        if len(self._trajectory.context) + len(token_ids) >= self.sampler.max_tokens:
            return False
        versions = self._trajectory.versions
        images = self.observations.images_of(observation)
        self._trajectory.add_observation(token_ids, versions[-1] if versions else 0, images)
        return True

    async def _call_environment(self, function: Callable[..., Any], name: str, *arguments: Any) -> Any:
        """Call the environment with its time limit."""
        began = time.monotonic()
        left = self._seconds_left()
        limit = min(self.settings.environment_timeout, left)
        which = (
            f"{name} of the environment"
            if limit < left
            else f"the episode (limit: {self.settings.episode_timeout:g} s)"
        )
        try:
            return await call_with_timeout(function, *arguments, timeout=limit, description=which)
        finally:
            self._environment_seconds += time.monotonic() - began

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def _close(self) -> None:
        """Close the environment; a failure is only noted, since the sample is complete."""
        environment, self._environment = self._environment, None
        if environment is None or (
            isinstance(environment, Environment) and type(environment).close is Environment.close
        ):
            return
        try:
            await call_with_timeout(
                environment.close, timeout=self.settings.environment_timeout, description="close() of the environment"
            )
        except Exception as error:
            self.error = self.error or error

    def _sample(self, ended: EndReason) -> Sample:
        trajectory = self._trajectory
        finish = FINISH_REASONS[ended]
        if ended == "done" and trajectory.last_action is not None and trajectory.last_action.finish_reason == "length":
            finish = "length"  # the last turn was truncated
        whole = self._scored and trajectory.turns > 0 and ended not in ("time", "error")
        last = trajectory.last_action.token_ids if trajectory.last_action is not None else []
        sample = trajectory.sample(finish, {})
        sample.info |= {
            "reward": sum(trajectory.rewards.values()) if whole else None,
            "ended": ended,
            "turns": trajectory.turns,
            "failed": ended in ("time", "error"),
            "environment_tokens": len(trajectory.token_ids) - trajectory.num_action_tokens,
            "environment_seconds": self._environment_seconds,
            "last_text": self.observations.tokenizer.decode(last, skip_special_tokens=True),
            "steps": self._steps,
        }
        if self.error is not None:
            sample.info["error"] = f"{type(self.error).__name__}: {self.error}"
        return sample
