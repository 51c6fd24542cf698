"""Find the assistant's turns in a conversation that a chat template has written, and mask their tokens.

Templates with ``{% generation %}`` mark the turns themselves. Others are rendered twice, the second time with one
turn's content replaced by a character that occurs nowhere else; the difference is that content as the template writes
it. This also holds for templates that write a turn differently once others follow, for example without its reasoning.

A turn begins after the generation prompt and ends with the first special token after its content, the end-of-turn
token. Line breaks that a template writes after that token are not learned.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from rlhfkit.datamodules.tokenization.chat import PromptFormatter

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
Stop = Literal["learned", "left out", "missing"]
T = TypeVar("T")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
_SENTINEL = "\ue000"
"""A private-use character, which no template writes; texts with it are never tokenised."""


class Conversation(NamedTuple):
    """A conversation as text."""

    text: str
    """The text that the model reads."""
    spans: list[Span]
    """Ranges of characters that are learned, ascending, ends excluded."""
    stop: Stop
    """Whether the end-of-turn token of the last learned turn is in its span, after it, or missing."""


def write_conversation(formatter: PromptFormatter, messages: Messages, *, first: int = 0) -> Conversation:
    """Render a conversation and find the assistant's turns from message ``first`` on.

    Raises ValueError if a turn consists of tool calls and the template does not write them.
    """
    _check_calls(formatter, messages)
    if _GENERATION.search(formatter.chat_template):
        text, spans = _marked(formatter, messages, first)
    else:
        text = formatter.render(messages, generation=False)
        turns = [turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"]
        found = [_span(formatter, messages, turn, text) for turn in turns]
        spans = [span for span in found if span is not None]
    return Conversation(text, spans, _stop(formatter, text, spans))


def _check_calls(formatter: PromptFormatter, messages: Messages) -> None:
    """Raise ValueError if the template ignores tool calls and a turn has nothing else."""
    calling = [turn for turn, message in enumerate(messages) if message.get("tool_calls") and not message["content"]]
    if not calling:
        return
    silent = list(messages)
    silent[calling[0]] = {key: value for key, value in messages[calling[0]].items() if key != "tool_calls"}
    if formatter.render(silent, generation=False) == formatter.render(messages, generation=False):
        raise ValueError(
            "a turn consists of tool calls, which the chat template does not write: an empty answer would be learned; "
            "use a template with tool calls, or write the calls into the content"
        )


def _marked(formatter: PromptFormatter, messages: Messages, first: int) -> tuple[str, list[tuple[int, int]]]:
    """Return text and spans from the template's own generation marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # The tokenizer's own apply_chat_template gives token masks only, and wrong ones where a mark ends inside a token.
    texts, marks = render_jinja_template(
        conversations=[formatter.handle_special_tokens(list(messages), templated=True)],
        return_assistant_tokens_mask=True,
        **{**formatter.tokenizer.special_tokens_map, **formatter.arguments, "chat_template": formatter.chat_template},
    )
    text, spans = formatter.expand(texts[0], marks[0], messages)
    begin = 0
    if first:
        begin = common_prefix(text, formatter.render(_replaced(messages, first), generation=False))
    return text, [(start, end) for start, end in spans if end > max(start, begin)]


def _span(formatter: PromptFormatter, messages: Messages, turn: int, text: str) -> tuple[int, int] | None:
    """Return the range of characters of one turn; ``None`` if the template leaves the turn out."""
    replaced = formatter.render(_replaced(messages, turn), generation=False)
    if _SENTINEL not in replaced:
        return None
    content = common_prefix(text, replaced)
    behind = len(text) - min(common_prefix(text[::-1], replaced[::-1]), len(text) - content)
    alone = replaced  # the conversation up to this turn shows what the template writes right after it
    if turn < len(messages) - 1:
        alone = _written(formatter, _replaced(messages[: turn + 1], turn)) or replaced
    closing = alone.rpartition(_SENTINEL)[2]
    if not messages[turn]["content"] and not text.startswith(closing[:1], behind):
        closing = closing.lstrip()  # white space between the content and what follows it, for example tool calls
    closing = closing[: common_prefix(text[behind:], closing)]
    end_of_turn = formatter.special_pattern.search(closing)
    start = _start(formatter, messages[:turn], text, content, alone)
    end = behind + (end_of_turn.end() if end_of_turn else len(closing))
    return (start, end) if start < end else None


def _written(formatter: PromptFormatter, messages: Messages, *, generation: bool = False) -> str | None:
    """Render the beginning of a conversation; ``None`` if the template refuses it, for example without a user turn."""
    from jinja2 import TemplateError

    try:
        return formatter.render(messages, generation=generation) if messages else None
    except TemplateError:
        return None


def _start(formatter: PromptFormatter, before: Messages, text: str, content: int, alone: str) -> int:
    """Return the start of a turn: after the generation prompt, or at the content if no such prompt is written here."""
    asked, plain = (_written(formatter, before, generation=generation) for generation in (True, False))
    if asked is None or plain is None:
        return content
    if text.startswith(asked):
        return len(asked)
    header = asked[common_prefix(asked, plain) :]
    place = text.rfind(header, 0, content) if header else -1
    if place >= 0:
        return place + len(header)
    between = alone[len(asked) : alone.index(_SENTINEL)] if alone.startswith(asked) else ""
    return content - len(between) if text.endswith(between, 0, content) else content


def _replaced(messages: Messages, turn: int) -> list[Mapping[str, Any]]:
    changed = list(messages)
    changed[turn] = {**changed[turn], "content": _SENTINEL}
    return changed


def _stop(formatter: PromptFormatter, text: str, spans: Sequence[Span]) -> Literal["learned", "left out", "missing"]:
    if not spans:
        return "missing"
    start, end = spans[-1]
    if text[start:end].rstrip().endswith(formatter.special_tokens):
        return "learned"
    return "left out" if text[end:].lstrip().startswith(formatter.special_tokens) else "missing"


def span_mask(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a text and whether each has a character in a span.

    The text contains its special tokens; spans are ascending ranges of characters, ends excluded.
    """
    if not tokenizer.is_fast:
        return _mask_by_prefixes(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask, places = [], iter([*spans, (len(text) + 1, len(text) + 1)])
    start, end = next(places)
    for begin, behind in encoded["offset_mapping"]:
        while begin >= end:
            start, end = next(places)
        mask.append(max(behind, begin + 1) > start)
    return list(encoded["input_ids"]), mask


def _mask_by_prefixes(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """:func:`span_mask` for tokenizers without offsets.

    The token at a character is the first one that differs between the tokens of the text up to there and of the whole
    text. White space that merges differently at the end of a text is therefore selected too.
    """

    def tokens(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    whole = tokens(text)
    mask = [False] * len(whole)
    for span in spans:
        start, end = (common_prefix(tokens(text[:place]), whole) for place in span)
        mask[start:end] = [True] * (end - start)
    return whole, mask


def common_prefix(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the length of the longest common prefix of two texts or two lists."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
