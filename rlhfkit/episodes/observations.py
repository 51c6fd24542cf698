"""Tokenise observations so that they can be appended to sampled tokens, which are never tokenised again.

A chat template formats whole conversations. To find what it appends to an assistant turn, that turn is replaced by a
character that occurs nowhere else, and the text after it (end of turn, new messages, start of the next turn) is
tokenised. The turn itself stays as sampled, even where the template would format it differently (without thoughts,
say).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.datamodules.tokenization.chat import PromptFormatter
from rlhfkit.datamodules.tokenization.columns import TEMPLATE_ARGUMENTS
from rlhfkit.episodes.environment import Message, Observation

_SENTINEL = "\ue000"
"""A private-use character that no template writes."""

_SOME_CONVERSATION: tuple[Message, ...] = ({"role": "user", "content": "."},)
"""Used for the messages before a turn if they are unknown."""


class ObservationTokenizer:
    """Tokenises observations for one model; ``template_arguments`` are passed to the chat template.

    Conversations are written as in data, control tokens in their texts as text: a tool's output must not start another
    role's turn.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._options: dict[str, Any] = {
            "apply_chat_template": False,
            "chat_template_kwargs": template_arguments,
            "special_tokens_in_text": "escape",
        }
        self.formatter = PromptFormatter(tokenizer, **self._options)

    def use_images(self, processor: Any) -> None:
        """Let messages have images, which a model's processor reads; ``None``: the model reads text only."""
        if processor is not None and not self.formatter.sees_images:
            from rlhfkit.datamodules.tokenization.images import VisionFormatter

            self.formatter = VisionFormatter(self.tokenizer, processor, **self._options).for_row({}, "an observation")

    def opened(self, observation: Observation) -> Observation:
        """Return the observation with the parts of its messages as the data's: texts joined, images as references.

        Raises ValueError for images if the model reads text only.
        """
        if not is_conversation(observation):
            return observation
        messages = cast(Sequence[Message], observation)
        return [
            self.formatter.as_messages([message])[0] if isinstance(message.get("content"), list) else message
            for message in messages
        ]

    def images_of(self, observation: Observation) -> tuple[Any, ...]:
        """Return the images of an observation of :meth:`opened`, in the order of their tokens."""
        if not is_conversation(observation):
            return ()
        return self.formatter.attachments(cast(Sequence[Message], observation))

    def row_arguments(self, prompt: Prompt) -> dict[str, Any]:
        """Return what the template is given for the row of a prompt, beside what it is given for all rows."""
        own = prompt.metadata.get(TEMPLATE_ARGUMENTS)
        return {} if not own else self.formatter.for_row({TEMPLATE_ARGUMENTS: own}).arguments

    def encode_conversation(self, messages: Sequence[Message], **arguments: Any) -> list[int]:
        """Return the token ids of a conversation up to the start of the policy's turn.

        ``arguments`` are passed to the template besides its own. Raises ``ValueError`` if there is no template, or it
        refuses the messages.
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
        """Return the token ids of an observation, to be appended to the trajectory.

        Text and token ids are used as they are. Messages go through the chat template; they can only follow a ``turn``,
        which the template ends, after the messages of ``conversation`` if they are known.

        Raises:
            TypeError: If the observation has the wrong type.
            ValueError: If there is no template, or it refuses the messages or omits the turn.
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
            raise ValueError("chat messages can only follow a turn of the policy")
        return self._encode(self._without_stop(self._tail(listed, conversation, arguments), turn))

    def _tail(self, messages: Sequence[Message], conversation: Sequence[Message] | None, arguments: Any) -> str:
        """Return what the template writes after the assistant's turn."""
        marked = [*(conversation or _SOME_CONVERSATION), {"role": "assistant", "content": _SENTINEL}]
        text = self._render([*marked, *messages], arguments)
        if text.count(_SENTINEL) != 1:
            raise ValueError(
                "the chat template leaves out what an assistant has said once messages of role "
                f"{messages[0]['role']!r} follow, so it cannot continue a conversation: use another role or template"
            )
        return text.partition(_SENTINEL)[2]

    def _without_stop(self, tail: str, turn: Sample) -> str:
        """Remove the end-of-turn token if it was sampled."""
        if turn.finish_reason != "stop" or not turn.num_tokens:
            return tail
        last = self.tokenizer.decode(turn.token_ids[-1:], skip_special_tokens=False)
        space, found, rest = tail.partition(last)
        return rest if last.strip() and found and not space.strip() else tail

    def _render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise ValueError(
                "observations are chat messages, but the tokenizer has no chat template: return text from the "
                "environment"
            )
        formatter = self.formatter
        if arguments:
            tools = formatter.handle_special_tokens(arguments.get("tools"), templated=True)
            formatter = copy.copy(formatter)
            formatter.arguments = formatter.arguments | dict(arguments) | ({} if tools is None else {"tools": tools})
        try:
            return formatter.render(
                [{**message, "content": message.get("content") or ""} for message in messages], generation=True
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def is_conversation(observation: Any) -> bool:
    """Whether an observation is a list of chat messages."""
    return (
        isinstance(observation, Sequence)
        and not isinstance(observation, str)
        and bool(observation)
        and all(isinstance(message, Mapping) and "role" in message for message in observation)
    )
