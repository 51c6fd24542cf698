"""Tool calls as models write them. Covers ``call.py``, ``json_formats.py`` and ``code_formats.py`` too.

The texts are those of the models' cards and chat templates.
"""

import asyncio
from functools import partial
from typing import Any, Literal, Optional

import pytest

from rlhfkit.episodes import Action, ToolEnvironment, tools
from rlhfkit.episodes.openai import session
from rlhfkit.episodes.tool_calls import (
    TOOL_CALL_PARSERS,
    ToolCall,
    template_parser,
    text_before_calls,
)

CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eom_id|>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]</s>',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    ),
    "qwen_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "pythonic": '[weather(city="Rome", days=2)]',
}
EXPECTED = ToolCall("weather", {"city": "Rome", "days": 2})


def said(text: str) -> Action:
    """An action; text without the special tokens that the formats use."""
    plain = text
    for token in ("<|python_tag|>", "<|eom_id|>", "</s>", "[TOOL_CALLS]", "<|python_start|>", "<|python_end|>"):
        plain = plain.replace(token, "")
    return Action(0, [1], plain, text, "stop")


def parsed(name: str, text: str) -> list[ToolCall]:
    return [
        call.typed(lambda argument: {"string"} if argument == "city" else set())
        for call in TOOL_CALL_PARSERS[name](said(text))
    ]


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_every_format_says_the_same_call(name: str) -> None:
    assert parsed(name, CALLS[name]) == [EXPECTED]
    assert parsed(name, "The weather is fine.") == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("hermes", 'so <tool_call>\n{"name": "f"}\n</tool_call> and<tool_call>{"name": "g"}</tool_call>', ["f", "g"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ["f"]),  # the end was a stop text
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": 1}}', ["f", "g"]),
        ("llama3_json", '{"city": "Rome"}', []),  # an answer in JSON
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": "{}"}]', ["f", "g"]),
        ("mistral", 'ok[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}</s>', ["f", "g"]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', ["f"]),
        (
            "deepseek",
            "so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g"
            '<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            ["f", "g"],
        ),
        ("qwen_xml", "<function=f></function><function=g><parameter=a>1", ["f", "g"]),
        ("pythonic", "[f(), g(a=[1, {'b': None}])]", ["f", "g"]),
        ("pythonic", "<|python_start|>[f(), g(a=-1)]<|python_end|>", ["f", "g"]),
        ("pythonic", "[1, 2]", []),
        ("hermes", "<tool_call>f(1)</tool_call>", "is not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "a tool call is"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "a tool call is"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>', "must be a JSON object"),
        ("llama3_json", '<|python_tag|>{"name": "f", ', "not valid JSON"),
        ("llama3_json", "<|python_tag|>f(1)", "is a JSON object"),
        ("mistral", "[TOOL_CALLS][{]", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]f{1}", "not valid JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>f()<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "must be a JSON object"),
        ("qwen_xml", "<tool_call>f()</tool_call>", "<function=NAME>"),
        ("pythonic", "[f(a=", []),  # cut off: no list of calls
        ("pythonic", "[f(a=g())]", "must be a literal"),
        ("pythonic", "[f(1)]", "by name"),
        ("pythonic", "<|python_start|>[f(a=<|python_end|>", "not a list of Python calls"),
        ("pythonic", "[f(a=__import__('os').system('x'))]", "must be a literal"),
    ],
)
def test_several_calls_newer_forms_and_those_that_cannot_be_read(name: str, text: str, found: list[str] | str) -> None:
    """The names of the calls, or what is wrong with the only one."""
    calls = TOOL_CALL_PARSERS[name](said(text))
    if isinstance(found, str):
        assert [found in call.error for call in calls] == [True], calls
    else:
        assert [(call.name, call.error) for call in calls] == [(one, "") for one in found]


TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}',
    "qwen_xml": "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
    "mistral": '{{- "[TOOL_CALLS]" }}{%- for tool_call in message.tool_calls %}',
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}",
    "pythonic": "{{- '<|python_start|>' }}",
    "llama3_json": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parser_is_found_from_the_template(name: str) -> None:
    class Tokenizer:
        chat_template: Any = TEMPLATES[name]

    assert template_parser(Tokenizer()) == name
    Tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": TEMPLATES[name]}
    assert template_parser(Tokenizer()) == name
    Tokenizer.chat_template = None
    assert template_parser(Tokenizer()) == "hermes"
    assert TEMPLATES.keys() == TOOL_CALL_PARSERS.keys()


def test_untyped_arguments_get_the_types_that_tools_take() -> None:
    def take(text: str, number: int, values: list[int], anything=None) -> list[Any]:  # type: ignore[no-untyped-def]
        return [text, number, values, anything]

    given = {"text": "12", "number": "12", "values": "[1, 2]", "anything": "so so"}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in given.items())
    environment = ToolEnvironment([take], tool_call_parser="qwen_xml")
    step = asyncio.run(environment.step(said(f"<tool_call><function=take>{body}</function></tool_call>")))
    assert step.observation == [{"role": "tool", "name": "take", "content": '["12", 12, [1, 2], "so so"]'}]


def test_what_is_said_before_calls() -> None:
    assert text_before_calls("so <tool_call>{}", "so <tool_call>{}") == "so"
    assert text_before_calls('f{"a": 1}', 'Well[TOOL_CALLS]f{"a": 1}') == "Well"
    assert text_before_calls('{"name": "f"}', '{"name": "f"}') == ""


VALUES = ["12", "1.5", "true", "null", "[1]", '{"a": 1}', '"12"', "word"]


@pytest.mark.parametrize(
    ("hint", "schema", "read"),
    [
        (str, {"type": "string"}, VALUES),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}, [*VALUES[:3], None, *VALUES[4:]]),
        (Optional[str], {"type": "string", "nullable": True}, [*VALUES[:3], None, *VALUES[4:]]),  # noqa: UP045
        ("str | None", {"type": ["string", "null"]}, [*VALUES[:3], None, *VALUES[4:]]),
        (Literal["12", "13"], {"enum": ["12", "13"]}, VALUES),
        (str | int, {"type": ["string", "integer"]}, [12, *VALUES[1:]]),
        (str | list[int], {"anyOf": [{"type": "string"}, {"type": "array"}]}, [*VALUES[:4], [1], *VALUES[5:]]),
        (int, {"type": "integer"}, [12, 1.5, True, None, [1], {"a": 1}, "12", "word"]),
        (Any, {}, [12, 1.5, True, None, [1], {"a": 1}, "12", "word"]),
    ],
)
def test_texts_stay_texts_where_a_tool_takes_texts_or_nothing(hint: Any, schema: Any, read: list[Any]) -> None:
    def tool(x: Any) -> None: ...

    tool.__annotations__["x"] = hint
    offered = [{"function": {"name": "tool", "parameters": {"properties": {"x": schema}}}}]
    for types_of in (partial(tools._types_of, tool), partial(session._types_of, offered, "tool")):
        calls = [ToolCall("tool", {"x": value, "unknown": value}, untyped=True).typed(types_of) for value in VALUES]
        assert [call.arguments["x"] for call in calls] == read
        assert [call.arguments["unknown"] for call in calls] == VALUES
