"""Parsers of tool calls by name, and the one that a model's chat template asks for."""

from collections.abc import Mapping
from typing import Any

from rlhfkit.episodes.tool_calls.call import ToolCallParser
from rlhfkit.episodes.tool_calls.code_formats import parse_pythonic_tool_calls, parse_qwen_xml_tool_calls
from rlhfkit.episodes.tool_calls.json_formats import (
    parse_deepseek_tool_calls,
    parse_llama3_tool_calls,
    parse_mistral_tool_calls,
    parse_tool_calls,
)

TOOL_CALL_PARSERS: Mapping[str, ToolCallParser] = {
    "hermes": parse_tool_calls,
    "llama3_json": parse_llama3_tool_calls,
    "mistral": parse_mistral_tool_calls,
    "deepseek": parse_deepseek_tool_calls,
    "qwen_xml": parse_qwen_xml_tool_calls,
    "pythonic": parse_pythonic_tool_calls,
}
"""Parsers by name."""

_MARKS = (
    ("qwen_xml", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""Names, and texts that the templates of such models have all of; the first that fits counts."""

CALL_MARKS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>",
    "<|python_start|>",
    "<|python_tag|>",
)
"""Where the calls of an answer begin, after what it says beside them."""


def tool_call_parser(given: str | ToolCallParser) -> ToolCallParser:
    """Return the parser of a name; a function is returned as it is.

    Raises:
        ValueError: If there is no parser of this name.
    """
    if callable(given):
        return given
    if given not in TOOL_CALL_PARSERS:
        raise ValueError(f"tool_call_parser must be a function or one of {', '.join(TOOL_CALL_PARSERS)}, got {given!r}")
    return TOOL_CALL_PARSERS[given]


def template_parser(tokenizer: Any) -> str:
    """Return the name of the parser whose format a tokenizer's chat template writes; ``"hermes"`` if it names none."""
    template = getattr(tokenizer, "chat_template", None)
    written = "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")
    return next((name for name, marks in _MARKS if all(mark in written for mark in marks)), "hermes")


def text_before_calls(text: str, raw_text: str) -> str:
    """Return what an answer with calls says before them; ``raw_text`` is the one with special tokens."""
    for where in (text, raw_text):
        found = [where.index(mark) for mark in CALL_MARKS if mark in where]
        if found:
            return where[: min(found)].strip()
    return ""
