"""``PromptFormatter``: the content of a prompt column as text and token ids, with or without a chat template."""

import copy
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Self, get_args

from rlhfkit.datamodules.tokenization.columns import SYSTEM, TEMPLATE_ARGUMENTS, TOOLS
from rlhfkit.datamodules.tokenization.sources import refuse_unseen_images

log = logging.getLogger(__name__)

SpecialTokensInText = Literal["keep", "refuse", "escape"]
"""What to do with texts in the data that the tokenizer would read as control tokens, such as ``<eos>``: keep them,
refuse them with an error, or put a space behind their first character so that they stay text."""


class SpecialTokenError(ValueError):
    """A text in the data contains a control token, and ``special_tokens_in_text`` is ``"refuse"``."""


def check_special_tokens_in_text(value: Any) -> None:
    """Raise ValueError unless the argument ``special_tokens_in_text`` is one of its values or ``None``."""
    if value is not None and value not in get_args(SpecialTokensInText):
        ways = ", ".join(map(repr, get_args(SpecialTokensInText)))
        raise ValueError(f"special_tokens_in_text must be {ways} or None, got {value!r}")


SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Role of a chat message by ``from`` of a ShareGPT turn."""

_WITHOUT_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""Keys that a message may have instead of content."""


def is_chat(content: Any) -> bool:
    """Whether a value is a non-empty list of chat messages, with role and content or ShareGPT's from and value."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(message, Mapping) and ({"role", "content"} <= set(message) or {"from", "value"} <= set(message))
            for message in content
        )
    )


def as_messages(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert chat messages to new dictionaries with ``role``, ``content`` (text) and the other keys.

    ShareGPT's turns get roles. Keys without a value are removed, because a table has every key in every row. Content in
    parts is joined. ``None`` beside tool calls or reasoning, as in OpenAI's API, becomes empty text, because a template
    would write the word "None". Raises ValueError for an unknown ShareGPT speaker, a part that is not text, or no
    content.
    """
    return [as_message(message) for message in content]


def as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message of :func:`as_messages`."""
    known = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "role" not in known:
        speaker = known.pop("from", None)
        if speaker not in SHAREGPT_ROLES:
            raise ValueError(f"a turn is from {speaker!r}; it must be from one of {', '.join(SHAREGPT_ROLES)}")
        known = {"role": SHAREGPT_ROLES[speaker], "content": known.pop("value", None)} | known
    if isinstance(known["content"], list):
        parts = known["content"]
        other = [part for part in parts if not isinstance(part, Mapping) or part.get("type", "text") != "text"]
        if other:
            raise ValueError(
                f"the content of a chat message must be text, one has a part {str(other[0])[:80]!r}: images need a "
                "model that sees them, and videos and sound cannot be trained on"
            )
        known["content"] = "".join(part["text"] for part in parts)
    if known["content"] is None:
        if not any(known.get(key) for key in _WITHOUT_CONTENT):
            raise ValueError(
                f"a message of the {known['role']} has no content (None) and no {', '.join(_WITHOUT_CONTENT)}: leave "
                "it out, or give it a text ('' for an empty one)"
            )
        known["content"] = ""
    return known


class PromptFormatter:
    """Renders and tokenises prompts, for supervised fine-tuning and reinforcement learning alike.

    Args:
        tokenizer: A Hugging Face tokenizer.
        apply_chat_template: Wrap text as a user message; ``None``: when the tokenizer has a template. Chat messages
            always go through the template.
        system: System message before each conversation.
        chat_template_kwargs: Passed to the template.
        special_tokens_in_text: See :data:`SpecialTokensInText`. ``None``: ``"escape"`` in chat messages, where control
            tokens could end or forge a turn, and ``"keep"`` in plain text, which has no other way to hold them.

    Raises:
        ValueError: If the template is asked for and the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool | None = None,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_text: SpecialTokensInText | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.wraps_text = tokenizer.chat_template is not None if apply_chat_template is None else apply_chat_template
        self.system = system
        self.arguments = dict(chat_template_kwargs or {})
        self.special_tokens_in_text = special_tokens_in_text
        self._warned = False
        self._writes_tools: dict[str, bool] = {}  # by template
        if self.wraps_text:
            self._require_template("apply_chat_template is true")

    sees_images = False
    """Whether rows may have images; see :class:`~rlhfkit.datamodules.tokenization.images.VisionFormatter`."""
    images: tuple[Any, ...] = ()
    """Those in the columns of the row whose texts are written."""

    def as_messages(self, content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """:func:`as_messages`; a formatter for a model that sees allows parts that are images."""
        return as_messages(content)

    def attachments(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        """The images of :meth:`messages`, in order: none, as the model reads text only."""
        return ()

    def images_of(self, content: Any) -> tuple[Any, ...]:
        """The images of text or chat messages of the row: none, as the model reads text only."""
        return ()

    def collapse(self, text: str, images: Sequence[Any]) -> str:
        """A text of :meth:`prompt` with one token in place of each image, as the data has it."""
        return text

    def expand(
        self, text: str, spans: Sequence[tuple[int, int]], messages: Sequence[Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """A text as the template wrote it, and ranges in it, with what stands for images in place of their tokens."""
        return text, list(spans)

    def check(self, content: Any, where: str) -> None:
        """Raise ValueError unless the content is text or chat messages for which there is a chat template."""
        if not isinstance(content, str) and not is_chat(content):
            raise ValueError(
                f"{where} must hold text or a list of chat messages (role and content), it holds "
                f"{type(content).__name__}: {str(content)[:80]!r}"
            )
        if not isinstance(content, str):
            self._require_template(f"{where} holds chat messages")
            try:
                self.as_messages(content)
            except ValueError as error:
                raise ValueError(f"{where} cannot be read: {error}") from error
        elif self.system is not None and not self.wraps_text:
            raise ValueError(
                "system= is a chat message, but the chat template is not used: use a tokenizer that has one, or put "
                "the text into the prompts"
            )

    def for_row(self, row: Mapping[str, Any], where: str = "the row") -> Self:
        """Return the formatter for one row; ``where`` is its place, for messages.

        Its column ``chat_template_kwargs`` overrides the common arguments (``chat_template`` may be one), ``system``
        the system message, and ``tools`` are given to the template.

        Raises ValueError if a column holds something else, the template does not write tools, or there are images.
        """
        refuse_unseen_images(row, where)
        return self._with_columns(row)

    def _with_columns(self, row: Mapping[str, Any]) -> Self:
        own, tools, system = _parsed(row.get(TEMPLATE_ARGUMENTS)), _parsed(row.get(TOOLS)), row.get(SYSTEM)
        if not own and not tools and system is None:
            return self
        changed = copy.copy(self)
        if own:
            if not isinstance(own, Mapping):
                raise ValueError(f"column {TEMPLATE_ARGUMENTS!r} must hold a mapping or JSON text of one, got {own!r}")
            # A table has every key in every row; this row has those with a value.
            changed.arguments = self.arguments | {key: value for key, value in own.items() if value is not None}
        if system is not None:
            if not isinstance(system, str):
                raise ValueError(f"column {SYSTEM!r} must hold text, the system message of its row, got {system!r}")
            changed.system = system or None
        if tools:
            if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
                raise ValueError(
                    f"column {TOOLS!r} must hold a list of JSON schemas or JSON text of one, got {tools!r}"
                )
            written = [_with_values(tool) for tool in tools]
            changed.arguments = changed.arguments | {"tools": self.handle_special_tokens(written, templated=True)}
            changed._require_tools()
        return changed

    def _require_tools(self) -> None:
        """Raise ValueError unless the template writes the tools that it is given."""
        self._require_template(f"column {TOOLS!r} holds tools")
        template = self.chat_template
        if template not in self._writes_tools:
            messages = [{"role": "user", "content": "?"}]
            without = copy.copy(self)
            without.arguments = {**self.arguments, "tools": None, "chat_template": template}
            written = (each.render(messages, generation=True) for each in (self, without))
            self._writes_tools[template] = len({*written}) == 2
        if not self._writes_tools[template]:
            raise ValueError(
                f"column {TOOLS!r} holds tools, which the chat template does not write, so that a model would not know "
                "them: use a template with tools, or remove the column"
            )

    @property
    def chat_template(self) -> str:
        """The template that writes this formatter's conversations: that for tools, if the tokenizer has several."""
        arguments = self.arguments
        template: str = self.tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
        return template

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens: begin and end of sequence and of turns, padding."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        every = {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        return tuple(sorted(every - {""}))

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the first special token in a text."""
        return re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")

    def style(self) -> list[Any]:
        """What texts depend on besides the tokenizer, as plain values."""
        return [self.wraps_text, self.system, self.arguments, self.special_tokens_in_text]

    def _require_template(self, reason: str) -> None:
        if self.tokenizer.chat_template is None:
            cure = "use the tokenizer of a chat model, or give chat_template_kwargs={'chat_template': ...}"
            raise ValueError(f"{reason}, but the tokenizer has no chat template: {cure}")

    def templated(self, content: Any) -> bool:
        """Whether this content goes through the chat template."""
        return self.wraps_text or not isinstance(content, str)

    def messages(self, content: Any) -> list[Any]:
        """Convert text or chat messages to chat messages, with the system message unless they begin with one."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else self.as_messages(content)
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def render(self, messages: Sequence[Any], *, generation: bool) -> str:
        """Render chat messages as text, followed by the generation prompt if ``generation``."""
        text: str = self.tokenizer.apply_chat_template(
            self.handle_special_tokens(list(messages), templated=True),
            tokenize=False,
            add_generation_prompt=generation,
            **self.arguments,
        )
        return text

    def prompt(self, content: Any) -> str:
        """Render text or chat messages as the text that the policy continues."""
        if self.templated(content):
            return self.render(self.messages(content), generation=True)
        text: str = self.handle_special_tokens(content, templated=False)
        return text

    def handle_special_tokens(self, value: Any, *, templated: bool) -> Any:
        """Apply ``special_tokens_in_text`` to a text or all texts in messages; SpecialTokenError for refused tokens."""
        way = self.special_tokens_in_text or ("escape" if templated else "keep")
        if way == "keep":
            return value
        if isinstance(value, Mapping):
            return {key: self.handle_special_tokens(part, templated=templated) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.handle_special_tokens(part, templated=templated) for part in value]
        return self._handle_text(value, refuse=way == "refuse") if isinstance(value, str) else value

    def _handle_text(self, text: str, *, refuse: bool) -> str:
        found = self.special_pattern.search(text)
        if found is None:
            return text
        if refuse:
            shown = text[max(found.start() - 30, 0) : found.end()]
            raise SpecialTokenError(
                f"has the control token {found[0]!r} in its text ({shown!r}): remove it, or let "
                "special_tokens_in_text='escape' write it as text, or 'keep' it"
            )
        if not self._warned:
            self._warned = True
            log.warning(
                "texts have control tokens in them, such as %r; they are written as text (%r). If those of the data "
                "are meant as control tokens: special_tokens_in_text='keep'",
                found[0],
                f"{found[0][0]} {found[0][1:]}",
            )
        longer = re.compile("|".join(re.escape(token) for token in self.special_tokens if len(token) > 1) or r"(?!)")
        while (found := longer.search(text)) is not None:  # a token of one character has no inside for a space
            text = f"{text[: found.start() + 1]} {text[found.start() + 1 :]}"
        return text

    def tokenize(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Return the token ids of texts that are to be continued, each with whether it went through the template.

        Templated texts contain their special tokens; for others, the tokenizer adds those in front, and an
        end-of-sequence token that it adds is removed.
        """
        found = {
            kind: iter(self._tokenize([text for text, templated in texts if templated is kind], templated=kind))
            for kind in {templated for _, templated in texts}
        }
        return [next(found[templated]) for _, templated in texts]

    def _tokenize(self, texts: Sequence[str], *, templated: bool) -> list[list[int]]:
        token_ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=not templated)["input_ids"]
        end, written = self.tokenizer.eos_token_id, self.tokenizer.eos_token
        if not templated and end is not None:
            for text, ids in zip(texts, token_ids, strict=True):
                if ids and ids[-1] == end and not text.endswith(written):
                    ids.pop()
        return token_ids


def _parsed(value: Any) -> Any:
    """A value of a table, read if it is JSON text."""
    return json.loads(value) if isinstance(value, str) and value.strip() else value


def _with_values(value: Any) -> Any:
    """A JSON schema without the keys that a table has added because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _with_values(part) for key, part in value.items() if part is not None}
    return [_with_values(part) for part in value] if isinstance(value, list) else value
