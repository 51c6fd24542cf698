"""``Episodes``: a group function whose samples are episodes with an environment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rlhfkit.data.types import Prompt
from rlhfkit.episodes.base import EpisodeGroups
from rlhfkit.episodes.environment import Environment
from rlhfkit.episodes.episode import Episode, EpisodeLimits
from rlhfkit.episodes.observations import ObservationTokenizer
from rlhfkit.episodes.tool_calls import ToolCallParser
from rlhfkit.episodes.tools import ToolEnvironmentFactory
from rlhfkit.rollout.engine import check_context
from rlhfkit.rollout.groups import GroupSampler
from rlhfkit.validation import check_number


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
        self.environment_timeout = environment_timeout
        self._observations: ObservationTokenizer | None = None

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
        self._observations = ObservationTokenizer(tokenizer, dict(theirs or {}) if own is None else own)
        if isinstance(self.environment, ToolEnvironmentFactory):
            self.environment.use_template_of(tokenizer)

    def close(self) -> None:
        """Forget the tokenizer; a second call does nothing."""
        self._observations = None

    def episode(self, prompt: Prompt, sample_index: int, sampler: GroupSampler) -> Episode:
        """Return an episode; raises ValueError if the prompt leaves no room for a completion."""
        assert self._observations is not None  # configured by who calls
        check_context([prompt], 1, sampler.max_tokens)
        return Episode(
            prompt,
            sample_index,
            environment=self.environment,
            sampler=sampler,
            observations=self._observations,
            limits=EpisodeLimits(
                max_turns=self.max_turns,
                max_tokens=sampler.max_tokens,
                timeout=self.episode_timeout,
                call_timeout=self.environment_timeout,
            ),
        )


def _environment(
    environment: Any, tools: Sequence[Callable[..., Any]], parser: str | ToolCallParser | None
) -> Callable[[], Environment]:
    """Return a function that creates environments."""
    if (environment is None) != bool(tools):
        raise ValueError("Episodes takes either an environment or tools")
    if environment is None:
        factory: Callable[[], Environment] = ToolEnvironmentFactory(tools, parser)
        factory()  # raises if the tools are invalid
        return factory
    if parser is not None:
        raise ValueError("tool_call_parser finds calls of tools: give tools, or leave it out beside an environment")
    if isinstance(environment, Environment) or not callable(environment):
        raise TypeError(
            "environment must be a class or a function that makes a new Environment for each episode, got "
            f"{environment!r}"
        )
    made: Callable[[], Environment] = environment
    return made
