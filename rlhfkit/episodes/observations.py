"""How observations become token ids behind what was sampled, of which nothing is ever encoded again.

A chat template writes whole conversations. What it writes behind an assistant's turn is found by putting a character
that occurs nowhere else in place of that turn: the end of the turn, the new messages, and the beginning of the next
turn. That alone is tokenised. The turn itself stays as sampled, also with templates that would now write it, or earlier
ones, differently (without thoughts, say): the policy goes on from what it has really seen.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rlhfkit.data.types import Sample
from rlhfkit.episodes.environment import Message, Observation

_SENTINEL = "\ue000"
"""A private-use character: no template writes it."""

_SOME_CONVERSATION: tuple[Message, ...] = ({"role": "user", "content": "."},)
"""In front of a turn whose conversation is not known."""


class ObservationTokenizer:
    """Writes observations for one model.

    Args:
        tokenizer: Of the model.
        template_arguments: Passed to the chat template: ``enable_thinking``, ``tools``.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})

    def encode_conversation(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """Token ids of a whole conversation, up to where the policy's turn begins.

        Args:
            messages: At least one.
            **arguments: For the template, besides its own.

        Raises:
            ValueError: If there is no template, or it refuses.
        """
        return self._encode(self._render(messages, arguments))

    def encode_observation(
        self,
        observation: Observation,
        turn: Sample | None = None,
        *,
        conversation: Sequence[Message] | None = None,
        **arguments: Any,
    ) -> list[int]:
        """Token ids of an observation, to be put behind what there is.

        Args:
            observation: Text and token ids are taken as they are; messages go through the chat template.
            turn: What was sampled last, which needs an end; messages cannot be put anywhere else.
            conversation: The messages in front of that turn, where they are known.
            **arguments: For the template, besides its own.

        Raises:
            TypeError: If the observation is none.
            ValueError: If there is no template, or it refuses or leaves the turn out.
        """
        if isinstance(observation, str):
            return self._encode(observation)
        listed: list[Any] = list(observation)
        if all(isinstance(token, int) for token in listed):
            return listed
        if not is_conversation(listed):
            raise TypeError(
                "an observation is text, a list of chat messages (role and content), or a list of token ids; got "
                f"{type(observation).__name__}: {str(observation)[:80]!r}"
            )
        if turn is None:
            raise ValueError("chat messages can be put behind a turn of the policy only")
        return self._encode(self._without_stop(self._tail(listed, conversation, arguments), turn))

    def _tail(self, messages: Sequence[Message], conversation: Sequence[Message] | None, arguments: Any) -> str:
        """What the template writes behind the assistant's turn."""
        marked = [*(conversation or _SOME_CONVERSATION), {"role": "assistant", "content": _SENTINEL}]
        text = self._render([*marked, *messages], arguments)
        if text.count(_SENTINEL) != 1:
            raise ValueError(
                "the chat template leaves out what an assistant has said once messages of role "
                f"{messages[0]['role']!r} follow, so it cannot continue a conversation: use another role or template"
            )
        return text.partition(_SENTINEL)[2]

    def _without_stop(self, tail: str, turn: Sample) -> str:
        """The same without the end-of-turn token, where that was sampled."""
        if turn.finish_reason != "stop" or not turn.token_ids:
            return tail
        last = self.tokenizer.decode(turn.token_ids[-1:], skip_special_tokens=False)
        space, found, rest = tail.partition(last)
        return rest if last.strip() and found and not space.strip() else tail

    def _render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise ValueError(
                "observations are chat messages, but the tokenizer has no chat template: let the environment give text"
            )
        plain = [self._plain(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True, **(self.template_arguments | dict(arguments))
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _plain(self, message: Message) -> dict[str, Any]:
        """The message without control tokens: who speaks is not for a tool's output to say."""
        cleaned: dict[str, Any] = self._cleaned({**message, "content": message.get("content") or ""})
        return cleaned

    def _cleaned(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._cleaned(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._cleaned(part) for part in value]
        while isinstance(value, str) and self._special_tokens.search(value):  # what is left may make another one
            value = self._special_tokens.sub("", value)
        return value

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Finds what the tokenizer would read as a control token."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        every = {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}
        return re.compile("|".join(map(re.escape, sorted(every, key=len, reverse=True))) or r"(?!)")

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def is_conversation(observation: Any) -> bool:
    """Whether this is a list of chat messages.

    Args:
        observation: Anything.
    """
    return (
        isinstance(observation, Sequence)
        and not isinstance(observation, str)
        and bool(observation)
        and all(isinstance(message, Mapping) and "role" in message for message in observation)
    )
