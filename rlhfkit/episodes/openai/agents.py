"""``AgentEpisodes``: a group function whose samples are the turns that agents request over OpenAI's API."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.episodes.base import EpisodeGroups
from rlhfkit.episodes.episodes import FINISH_REASONS, EndReason
from rlhfkit.episodes.tool_calls import ToolCallParser
from rlhfkit.episodes.tool_calls import tool_call_parser as find_parser
from rlhfkit.rollout.event_loop import call_with_timeout
from rlhfkit.rollout.groups import GroupSampler
from rlhfkit.serving.access import ServerOptions, check_host, is_loopback
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rlhfkit.episodes.openai.endpoint import OpenAIEndpoint
    from rlhfkit.episodes.openai.session import ChatSession


@dataclass(frozen=True)
class AgentConnection:
    """How an agent reaches the policy. All its requests are recorded as one episode."""

    base_url: str
    """Base URL of OpenAI's API; different for each episode."""
    api_key: str = field(repr=False)
    model: str = "policy"

    def client(self, **options: Any) -> Any:
        """Return an ``openai.AsyncOpenAI`` with these options; raises ``ImportError`` without ``openai``."""
        _require("openai")
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)


Agent = Callable[[AgentConnection, Prompt], Any]
"""Solves a prompt by sending requests to the policy, and returns the reward: a number, or ``None`` if there is none.
Async, or a plain function, which gets a thread.
"""


class AgentEpisodes(EpisodeGroups):
    """A sample is what the policy sampled for an agent, which runs for each prompt and index in the group.

    The agent, in any language or framework, reaches the policy at the ``base_url`` of its :class:`AgentConnection`
    (:class:`OpenAIEndpoint`). ``Sample.prompt`` has the tokens of its first request. Of several conversations, the one
    with the most sampled tokens is the sample; ``info["unused_tokens"]`` counts the others.

    ============================================== ============= ================= ==========
    end (``sample.info["ended"]``)                 finish_reason truncated         reward
    ============================================== ============= ================= ==========
    ``done``: the agent returned                   stop          no                kept
    ``turns``, ``tokens``: it reached a limit and  length        yes               as returned
    returned, or raised the error it got
    ``time``: it took too long                     abort         no                none
    ``error``: it raised, or sent no request       abort         no                none
    ============================================== ============= ================= ==========

    Example::

        async def agent(connection, prompt):
            answer = await connection.client().chat.completions.create(
                model=connection.model, messages=[{"role": "user", "content": prompt.text}]
            )
            return float(prompt.answer in answer.choices[0].message.content)


        RolloutCallback(engine=VLLMPool(2), group=AgentEpisodes(agent), reward=EnvironmentReward())

    Args:
        agent: See :data:`Agent`.
        max_turns: Requests of an episode.
        max_episode_tokens: Tokens of a conversation; ``None``: the model's context.
        episode_timeout: Time limit of an episode in seconds.
        request_timeout: Time limit of each request in seconds.
        concurrency: Concurrent episodes of each rank.
        parallel_calls: Concurrent calls of the engine; ``None``: see
            :class:`~rlhfkit.rollout.request_batcher.RequestBatcher`.
        on_error: ``"mask"``: a failed episode is not trained on; ``"raise"``: stop at the first one.
        server: Address, API key and TLS files of the endpoint.
        tool_call_parser: Finds tool calls in answers, by name or a function; see :class:`Episodes`.
        chat_template_kwargs: Passed to the chat template; ``None``: those of the DataModule without its tools, as the
            agent's requests have theirs.

    Raises:
        ImportError: If FastAPI or uvicorn is not installed.
        TypeError: If ``agent`` cannot be called.
        ValueError: If a limit is out of range, or the host needs a token.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        max_turns: int = 32,
        max_episode_tokens: int | None = None,
        episode_timeout: float = 1800.0,
        request_timeout: float = 600.0,
        concurrency: int = 256,
        parallel_calls: int | None = None,
        on_error: Literal["mask", "raise"] = "mask",
        server: ServerOptions = ServerOptions(),  # noqa: B008  # frozen
        tool_call_parser: str | ToolCallParser | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_number("request_timeout", request_timeout, above=0, why="it is in seconds")
        check_integer("concurrency", concurrency, minimum=1)
        _require("fastapi", "uvicorn")
        super().__init__(
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            episode_timeout=episode_timeout,
            blocked_after=60.0,
            concurrency=concurrency,
            parallel_calls=parallel_calls,
            on_error=on_error,
            chat_template_kwargs=chat_template_kwargs,
        )
        if tool_call_parser is not None:
            find_parser(tool_call_parser)  # raises if there is none of this name
        if not callable(agent):
            raise TypeError(f"agent must be a function of a connection and a prompt, got {type(agent).__name__}")
        if server.token is not None or not is_loopback(server.host):
            check_host(server.host, server.token)
        self.agent = agent
        self._options: dict[str, Any] = {
            "server": server,
            "tool_call_parser": tool_call_parser,
            "request_timeout": request_timeout,
            "parallel_calls": parallel_calls,
            "max_concurrent": max(1024, 4 * concurrency),  # an agent may ask several things at once
        }
        self._tokenizer: Any = None
        self._template_arguments: dict[str, Any] = {}
        self._endpoint: OpenAIEndpoint | None = None

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the run's tokenizer and template."""
        self._tokenizer = tokenizer
        if self.chat_template_kwargs is None:
            self._template_arguments = dict(chat_template_kwargs or {})
            self._template_arguments.pop("tools", None)
        else:
            self._template_arguments = self.chat_template_kwargs

    def endpoint(self, sampler: GroupSampler) -> "OpenAIEndpoint":
        """Return the endpoint, which begins to listen when the first agent runs: ranks that never sample have none."""
        if self._endpoint is None:
            from rlhfkit.episodes.openai.endpoint import OpenAIEndpoint

            self._endpoint = OpenAIEndpoint(
                sampler.engine,
                self._tokenizer,
                max_context_tokens=sampler.max_tokens,
                chat_template_kwargs=self._template_arguments,
                **self._options,
            ).start()
        return self._endpoint

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def episode(self, prompt: Prompt, sample_index: int, sampler: GroupSampler) -> "_AgentEpisode":
        """Return an episode; the agent decides what the policy reads."""
        return _AgentEpisode(prompt, sample_index, self, sampler)


class _AgentEpisode:
    """One run of the agent."""

    def __init__(self, prompt: Prompt, sample_index: int, settings: AgentEpisodes, sampler: GroupSampler) -> None:
        self._prompt = prompt
        self._sample_index = sample_index
        self._settings = settings
        self._sampler = sampler
        self.error: Exception | None = None

    async def run(self) -> Sample:
        """Run the agent and return its sample."""
        settings, sampler = self._settings, self._sampler
        endpoint = settings.endpoint(sampler)
        name, session = endpoint.open_session(
            self._prompt,
            self._sample_index,
            sampler.sampling,
            iteration=sampler.iteration,
            max_turns=settings.max_turns,
        )
        connection = AgentConnection(endpoint.base_url(name), endpoint.api_key)
        reward: float | None = None
        ended: EndReason = "done"
        began = time.monotonic()
        limit = settings.episode_timeout
        try:
            returned = await call_with_timeout(
                settings.agent,
                connection,
                self._prompt,
                timeout=limit,
                description=f"the agent (limit: {limit:g} s)",
            )
            reward = None if returned is None else float(returned)
        except Exception as error:
            self.error = error
            ended = "time" if time.monotonic() - began >= limit else "error"
        finally:
            endpoint.close_session(name)
        if session.engine_failure is not None:
            raise session.engine_failure
        if ended == "done" and not session.turns:
            ended, self.error = "error", RuntimeError("the agent sent no request to the policy")
        if session.limit is not None and ended != "time":
            ended = "turns" if session.limit == "turns" else "tokens"
        return self._sample(session, ended, reward, time.monotonic() - began)

    def _sample(self, session: "ChatSession", ended: EndReason, reward: float | None, seconds: float) -> Sample:
        failed = ended in ("time", "error")
        info: dict[str, Any] = {
            "reward": None if failed else reward,
            "ended": ended,
            "failed": failed,
            "turns": 0,
            "seconds": seconds,
        }
        if self.error is not None:
            info["error"] = f"{type(self.error).__name__}: {self.error}"
        return session.sample(FINISH_REASONS[ended], info["reward"], info)


def _require(*names: str) -> None:
    """Raise ``ImportError`` unless these packages are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"agents need {' and '.join(missing)}, not installed here: pip install 'rlhfkit[agents]'")
