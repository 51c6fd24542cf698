"""How models write tool calls: parsers by name, and the one that a chat template asks for.

A parser returns the calls in an answer of the policy (:class:`ToolCall`), or what is wrong with them, which the policy
can be told. What JSON may contain is limited, as the policy has written it.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfkit.episodes.environment import Action

MAX_NESTING = 64
"""Maximum nesting of lists and objects. Python fails at about 1000, chat templates and JSON parsers earlier."""


def check_json(value: Any) -> None:
    """Raise ``ValueError`` above ``MAX_NESTING`` levels, or for half a surrogate pair, which UTF-8 cannot encode."""
    values, level = [value], 0
    while values:
        if level > MAX_NESTING:
            raise ValueError(_TOO_DEEP)
        level += 1
        inside: list[Any] = []
        for one in values:
            if isinstance(one, str):
                try:
                    one.encode()
                except UnicodeEncodeError as error:
                    message = f"text must be Unicode; character {error.start} is half of a surrogate pair"
                    raise ValueError(message) from None
            elif isinstance(one, Mapping):
                inside += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                inside += one
        values = inside


_TOO_DEEP = f"lists and objects may be nested {MAX_NESTING} levels deep, not more"


def parse_json(text: str) -> Any:
    """Parse JSON from a client or model; raises ``ValueError`` if it is invalid or :func:`check_json` refuses it."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_json(value)
    return value


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the policy, or why it cannot be parsed."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Sent to the policy in place of a result."""
    untyped: bool = False
    """Whether the arguments are texts whose types the format does not say; see :meth:`typed`."""

    def typed(self, types_of: Callable[[str], Set[str]]) -> "ToolCall":
        """Parse the texts of an untyped call as JSON where the argument takes what they are.

        ``5`` is a number for an argument that takes numbers, texts or not, and a text for one that takes texts or
        nothing (``str | None``).

        Args:
            types_of: The types of JSON that an argument of this name takes (``string``, ``integer``, ``null`` ...);
                none: unknown, so that all JSON is parsed.
        """
        if not self.untyped:
            return self
        arguments = {name: _value(value, types_of(name)) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, untyped=False)


ToolCallParser = Callable[[Action], Sequence[ToolCall]]
"""Returns the tool calls in an action, in order. No calls: the action is the answer."""


def call_of(written: Any, *, arguments_name: str = "arguments") -> ToolCall:
    """Return the call that parsed JSON describes, ``{"name": ..., arguments_name: {...}}``; its error if it is none."""
    if not isinstance(written, Mapping) or not isinstance(written.get("name"), str):
        return ToolCall(error=f'a tool call is {{"name": ..., "{arguments_name}": {{...}}}}')
    arguments = written.get(arguments_name, {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(written["name"], error="the arguments of a tool call must be a JSON object")
    return ToolCall(written["name"], arguments)


def call_of_text(text: str, **names: Any) -> ToolCall:
    """Return the call that a text of JSON describes, see :func:`call_of`; its error if it is no JSON."""
    try:
        return call_of(parse_json(text), **names)
    except ValueError as error:
        return ToolCall(error=f"the tool call is not valid JSON: {error}")


def _value(text: Any, types: Set[str]) -> Any:
    if not isinstance(text, str):
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    kept = "string" in types and (isinstance(value, str) or not types & _json_types(value))
    return text if kept else value


def _json_types(value: Any) -> set[str]:
    """The types of JSON that a value is of, as in schemas."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) else {"number"}
    return {"array" if isinstance(value, list) else "object"}


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


_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def parse_qwen_xml_tool_calls(action: Action) -> list[ToolCall]:
    """Parse ``<function=name><parameter=key>value</parameter></function>``, the format of Qwen3-Coder.

    Values are texts, one line break around them left out; the types are those that the tools take.
    """
    calls = []
    for name, body in _FUNCTION.findall(action.text):
        arguments = {
            key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(body)
        }
        calls.append(
            ToolCall(name.strip(), arguments, untyped=True)
            if name.strip()
            else ToolCall(error="a tool call begins with <function=NAME>")
        )
    if not calls and "<tool_call>" in action.text:
        return [ToolCall(error="a tool call is <tool_call><function=NAME>...</function></tool_call>")]
    return calls


_PYTHON = re.compile(r"<\|python_start\|>(.*?)(?:<\|python_end\|>|\Z)", re.DOTALL)
_LIST_OF_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(.*\]", re.DOTALL)


def parse_pythonic_tool_calls(action: Action) -> list[ToolCall]:
    """Parse ``[search(query="a"), add(a=1, b=2)]``, the format of Llama 4, ToolACE and some others.

    The whole answer is the list, between ``<|python_start|>`` and ``<|python_end|>`` or not. Only literals are
    arguments; nothing is evaluated.
    """
    inside = _PYTHON.findall(action.raw_text)
    text = (inside[0] if inside else _END_OF_TURN.sub("", action.text)).strip()
    if not inside and not _LIST_OF_CALLS.fullmatch(text):
        return []
    try:
        written = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ToolCall(error=f"the tool calls are not a list of Python calls: {error}")]
    listed = written.elts if isinstance(written, ast.List) else [written]
    return [_python_call(one) for one in listed]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall(error="a tool call is name(argument=value, ...)")
    name = ast.unparse(node.func)
    if node.args or any(one.arg is None for one in node.keywords):
        return ToolCall(name, error="the arguments of a tool call are given by name")
    arguments: dict[str, Any] = {}
    for one in node.keywords:
        try:
            arguments[str(one.arg)] = ast.literal_eval(one.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return ToolCall(name, error=f"the argument {one.arg} of a tool call must be a literal")
    return ToolCall(name, arguments)


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
