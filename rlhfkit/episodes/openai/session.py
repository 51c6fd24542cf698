"""``ChatSession``: an agent's requests over the chat API, recorded as the tokens that were sampled.

Clients send the whole conversation with every request. The part shared with an earlier answer is not tokenised again:
its recorded tokens are used, and only new messages are appended. A request that continues no earlier answer (another
agent, a summarised conversation) starts a trajectory; one that continues an answer again (a retry) branches off there.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.episodes.environment import Action
from rlhfkit.episodes.observations import ObservationTokenizer
from rlhfkit.episodes.openai.protocol import ChatError, ChatRequest, assistant_message, normalize_message, same_message
from rlhfkit.episodes.tool_calls import ToolCallParser, text_before_calls
from rlhfkit.episodes.trajectory import Trajectory
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import RequestError
from rlhfkit.rollout.event_loop import run_in_thread
from rlhfkit.rollout.request_batcher import EngineFailedError, RequestBatcher, request_index

log = logging.getLogger(__name__)

_LONG = 20_000
"""Number of characters that are tokenised in a few milliseconds."""


@dataclasses.dataclass(slots=True, eq=False)
class ChatTurn:
    """One answer of the policy, with its context."""

    messages: list[dict[str, Any]]
    """The conversation, ending with the answer."""
    trajectory: Trajectory
    parent: "ChatTurn | None"
    reply: dict[str, Any]
    """The answer as it was sent to the client."""
    prompt_tokens: int
    request_id: str
    """Unique in the session, and the same in every run."""


class ChatSession:
    """All requests of one agent and their answers.

    Limits are ``max_turns`` answers, and ``max_context_tokens`` per conversation, answers included. ``iteration`` goes
    into the seeds.
    """

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        sampling: SamplingSpec,
        iteration: int,
        observations: ObservationTokenizer,
        tool_call_parser: ToolCallParser,
        max_context_tokens: int,
        max_turns: int,
    ) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.sampling = dataclasses.replace(sampling, group_size=1)
        self.iteration = iteration
        self.observations = observations
        self.tool_call_parser = tool_call_parser
        self.max_context_tokens = max_context_tokens
        self.max_turns = max_turns
        self.turns: list[ChatTurn] = []
        """In the order in which they were answered."""
        self.limit: str | None = None
        """``"turns"`` or ``"tokens"``: the limit that the agent has reached."""
        self.engine_failure: EngineFailedError | None = None
        self._asked: dict[bytes, int] = {}
        self._answering = 0
        self._warned = False

    async def answer(self, request: ChatRequest, sampler: RequestBatcher) -> ChatTurn:
        """Sample the policy's next turn in the conversation of a request.

        Raises :class:`ChatError` if that is impossible or a limit is reached, :class:`EngineFailedError` if the engine
        failed.
        """
        if len(self.turns) + self._answering >= self.max_turns:
            self.limit = self.limit or "turns"
            raise ChatError(f"the episode has used its {self.max_turns} turns", code="turn_limit_exceeded")
        sees = self.observations.formatter.sees_images
        messages = [normalize_message(message, images=sees) for message in request.messages]
        parent, trajectory = await self._context_of(messages, request.offered_tools)
        context = trajectory.context
        spec = self._sampling(request, len(context))
        seen = [image.key for image in trajectory.attachments]
        digest = hashlib.blake2b(repr((context, seen) if seen else context).encode(), digest_size=8).digest()
        repeat = self._asked[digest] = self._asked.get(digest, -1) + 1
        # Not the number of the request: the order of concurrent requests is not deterministic.
        index = request_index(self.prompt.index, self.sample_index, f"{digest.hex()}/{repeat}")
        self._answering += 1
        try:
            (sampled,) = await sampler.ask(
                Prompt(index, context, attachments=trajectory.attachments), spec, iteration=self.iteration
            )
        except RequestError as error:
            raise ChatError(str(error), code="refused") from error
        except EngineFailedError as failure:
            self.engine_failure = failure
            raise
        finally:
            self._answering -= 1
        trajectory.add_action(sampled)
        reply = self._reply(sampled, request, f"{digest.hex()}{repeat}")
        turn = ChatTurn(
            [*messages, normalize_message(reply)], trajectory, parent, reply, len(context), f"{digest.hex()}{repeat}"
        )
        self.turns.append(turn)
        return turn

    async def _context_of(self, messages: list[dict[str, Any]], tools: Any) -> tuple[ChatTurn | None, Trajectory]:
        """Return parent and context; what is long or has images is tokenised in a thread, off the event loop."""
        contents = [message["content"] for message in messages]
        if all(isinstance(content, str) for content in contents) and sum(map(len, contents)) <= _LONG:
            return self._build_context(messages, tools)
        self._answering += 1  # other requests of the session may arrive meanwhile
        try:
            built: tuple[ChatTurn | None, Trajectory] = await run_in_thread(self._build_context, messages, tools)
            return built
        finally:
            self._answering -= 1

    def _build_context(self, messages: list[dict[str, Any]], tools: Any) -> tuple[ChatTurn | None, Trajectory]:
        """Return the longest answer that the conversation continues, and the context that starts from it."""
        if messages[-1]["role"] == "assistant":
            raise ChatError("the last message is the assistant's own; there is nothing to answer")
        arguments = {} if tools is None else {"tools": tools}
        parent = max(
            (turn for turn in self.turns if _continues(messages, turn.messages)),
            key=lambda turn: len(turn.messages),
            default=None,
        )
        try:
            if parent is None:
                self._warn_of_changes(messages)
                token_ids = self.observations.encode_conversation(messages, **arguments)
                images = self.observations.images_of(messages)
                prompt = dataclasses.replace(self.prompt, token_ids=token_ids, attachments=images)
                return None, Trajectory(prompt, self.sample_index)
            known = len(parent.messages)
            trajectory = parent.trajectory.copy()
            new = self.observations.encode_observation(
                messages[known:], trajectory.last_action, conversation=messages[: known - 1], **arguments
            )
        except Exception as error:  # a template may raise any error over what a client has sent
            raise ChatError(f"{type(error).__name__}: {error}", code="template_error") from error
        trajectory.add_observation(new, trajectory.versions[-1], self.observations.images_of(messages[known:]))
        return parent, trajectory

    def _warn_of_changes(self, messages: Sequence[dict[str, Any]]) -> None:
        if self.turns and not self._warned and any(message["role"] == "assistant" for message in messages):
            self._warned = True
            log.warning(
                "prompt %d: an agent has sent back an answer that is not what was sampled; the conversation starts a "
                "new trajectory",
                self.prompt.index,
            )

    def _sampling(self, request: ChatRequest, length: int) -> SamplingSpec:
        room = self.max_context_tokens - length
        if room < 1:
            self.limit = self.limit or "tokens"
            raise ChatError(
                f"the conversation has {length} tokens; the limit is {self.max_context_tokens}, the answer included",
                code="context_length_exceeded",
            )
        spec = self.sampling
        most = min(spec.max_new_tokens, room, request.completion_limit or room)
        try:
            return dataclasses.replace(
                spec,
                max_new_tokens=most,
                min_new_tokens=min(spec.min_new_tokens, most),
                stop=(*spec.stop, *request.stop_texts),
                **request.form,
            )
        except ValueError as error:
            raise ChatError(str(error)) from error

    def _reply(self, sampled: Sample, request: ChatRequest, request_id: str) -> dict[str, Any]:
        tokenizer = self.observations.tokenizer
        text = tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        raw = tokenizer.decode(sampled.token_ids, skip_special_tokens=False)
        calls = []
        if request.offered_tools is not None:
            action = Action(len(self.turns), sampled.token_ids.tolist(), text, raw, sampled.finish_reason)
            parsed = [one for one in self.tool_call_parser(action) if not one.error]
            calls = [one.typed(partial(_types_of, request.offered_tools, one.name)) for one in parsed]
        return assistant_message(text, calls, request_id, before=text_before_calls(text, raw))

    def leaves(self) -> list[ChatTurn]:
        """Answers that no request has continued; each ends a trajectory."""
        parents = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in parents]

    def sample(self, finish_reason: FinishReason, reward: float | None, info: dict[str, Any]) -> Sample:
        """Return the trajectory with the most sampled tokens; among equals the last to end.

        ``reward`` is credited to its last action; ``info`` is added to ``Sample.info``.
        """
        leaves = self.leaves()
        if not leaves:
            return Trajectory(self.prompt, self.sample_index).sample(finish_reason, info)
        chosen = max(reversed(leaves), key=lambda turn: turn.trajectory.num_action_tokens)
        trajectory = chosen.trajectory.copy()
        if reward is not None:
            trajectory.add_reward(reward)
        used = trajectory.num_action_tokens
        sampled = sum(
            len(turn.trajectory.last_action.token_ids) for turn in self.turns if turn.trajectory.last_action is not None
        )
        last = trajectory.last_action.token_ids if trajectory.last_action is not None else []
        return trajectory.sample(
            finish_reason,
            info
            | {
                "turns": trajectory.turns,
                "environment_tokens": len(trajectory.token_ids) - used,
                "unused_tokens": sampled - used,
                "trajectories": len(leaves),
                "last_text": self.observations.tokenizer.decode(last, skip_special_tokens=True),
            },
        )


def _continues(messages: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation continues an earlier one."""
    return len(messages) > len(earlier) and all(
        same_message(one, other) for one, other in zip(messages, earlier, strict=False)
    )


def _types_of(tools: Sequence[Mapping[str, Any]], tool: str, argument: str) -> Set[str]:
    """The types of JSON that an argument of an offered tool takes, by its schema; text for an unknown argument."""
    for one in tools:
        function = one.get("function") if isinstance(one, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == tool:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return _types_of_schema(properties[argument]) if argument in properties else {"string"}
    return {"string"}


def _types_of_schema(schema: Any) -> Set[str]:
    if not isinstance(schema, Mapping):
        return set()
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        every = [_types_of_schema(option) for option in options]
        return set().union(*every) if all(every) else set()
    if "type" not in schema and all(isinstance(value, str) for value in schema.get("enum") or [None]):
        return {"string"}
    named = schema.get("type", [])
    nullable = {"null"} if schema.get("nullable") is True else set()
    return {named} | nullable if isinstance(named, str) else {*named} | nullable
