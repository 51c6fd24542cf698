"""Tool calls as JSON: the formats of Hermes and Qwen, Llama 3, Mistral and DeepSeek models."""

import json
import re

from rlhfkit.episodes.environment import Action
from rlhfkit.episodes.json_limits import parse_json
from rlhfkit.episodes.tool_calls.call import ToolCall, call_of, call_of_text

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_tool_calls(action: Action) -> list[ToolCall]:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen models."""
    return [call_of_text(text) for text in _HERMES.findall(action.text)]


_PYTHON_TAG = "<|python_tag|>"
_END_OF_TURN = re.compile(r"<\|(?:eot_id|eom_id|end_of_text|eot)\|>\s*\Z")


def parse_llama3_tool_calls(action: Action) -> list[ToolCall]:
    """Parse ``{"name": ..., "parameters": {...}}``, several separated by ``;``: the format of Llama 3.1 to 3.3.

    The whole answer is calls, with or without ``<|python_tag|>`` in front; a text that begins otherwise has none. The
    arguments may also be called ``arguments``.
    """
    text = _END_OF_TURN.sub("", action.raw_text if _PYTHON_TAG in action.raw_text else action.text)
    _, tag, after = text.partition(_PYTHON_TAG)
    rest = (after if tag else text).strip()
    if not rest.startswith("{"):
        return [ToolCall(error="a tool call is a JSON object")] if tag else []
    calls, decoder = list[ToolCall](), json.JSONDecoder()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall(error=f"the tool call is not valid JSON: {error}")]
        written = rest[:end]
        named = "parameters" if '"parameters"' in written else "arguments"
        calls.append(call_of_text(written, arguments_name=named))
        rest = rest[end:].lstrip(" \t\r\n;")
    # An answer in JSON that is no call, such as one that was asked for by a schema.
    return calls if any(one.name for one in calls) else []


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_MISTRAL_END = re.compile(r"</s>\s*\Z")


def parse_mistral_tool_calls(action: Action) -> list[ToolCall]:
    """Parse ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, the format of Mistral's models.

    Newer ones (tokenizers from version 11 on) write ``[TOOL_CALLS]name[ARGS]{...}`` for each call.
    """
    pieces = _MISTRAL_END.sub("", action.raw_text).split(_MISTRAL)[1:]
    calls: list[ToolCall] = []
    for piece in pieces:
        newer = _MISTRAL_CALL.fullmatch(piece)
        if newer is not None:
            calls.append(_named(newer[1], newer[2]))
            continue
        try:
            written = parse_json(piece.strip())
        except ValueError as error:
            calls.append(ToolCall(error=f"the tool calls are not valid JSON: {error}"))
            continue
        calls += map(call_of, written if isinstance(written, list) else [written])
    return calls


_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\s*([^\n]+?)\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


def parse_deepseek_tool_calls(action: Action) -> list[ToolCall]:
    """Parse the calls of DeepSeek V3, R1 (``function<｜tool▁sep｜>name`` and a block of JSON) and V3.1.

    V3.1 writes ``name<｜tool▁sep｜>{...}``; both between ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``.
    """
    calls = []
    for written in _DEEPSEEK.findall(action.raw_text):
        before, separator, after = written.partition("<｜tool▁sep｜>")
        fenced = _FENCED.fullmatch(after)
        if not separator:
            calls.append(ToolCall(error="a tool call has <｜tool▁sep｜> between its parts"))
        elif fenced is not None and before.strip() == "function":
            calls.append(_named(fenced[1], fenced[2]))
        else:
            calls.append(_named(before.strip(), after))
    return calls


def _named(name: str, arguments: str) -> ToolCall:
    try:
        return call_of({"name": name, "arguments": parse_json(arguments.strip())})
    except ValueError as error:
        return ToolCall(name, error=f"the arguments of the tool call are not valid JSON: {error}")
