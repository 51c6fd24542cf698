"""Tool calls that are no JSON: the tags of Qwen's coder models, and Python's calls."""

import ast
import re
from typing import Any

from rlhfkit.episodes.environment import Action
from rlhfkit.episodes.tool_calls.call import ToolCall

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
_END_OF_TURN = re.compile(r"<\|(?:eot_id|eom_id|eot|end_of_text)\|>\s*\Z")
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
