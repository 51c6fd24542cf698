"""Python programs of a policy, run in a sandbox as a tool."""

import asyncio
from collections.abc import Iterator

import pytest

from rlhfkit.episodes import Action, ToolEnvironment, tool_schemas
from rlhfkit.rewards import PythonTool


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    made = PythonTool(timeout=60.0, workers=2, allow_partial_isolation=True)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("def f(n):\n    return n * 2\n\n[f(n) for n in range(3)]", "[0, 2, 4]"),
        ("kept = 1", "(no output)"),
        ("print('a')\n1 / 0", "a\nZeroDivisionError: division by zero\n  line 2"),
        ("import sys\nprint('b')\nsys.exit(3)", "b"),
        ("print('{' + str({1: 2}) + '}')", "{{1: 2}}"),
    ],
)
def test_what_a_program_says_comes_back(tool: PythonTool, code: str, text: str) -> None:
    assert tool.run(code) == text


def test_programs_that_cannot_be_read_say_so_and_nothing_is_kept_between_two(tool: PythonTool) -> None:
    assert "SyntaxError" in tool.run("if True print(1)")
    assert "NameError" in tool.run("kept")


def test_a_policy_calls_it(tool: PythonTool) -> None:
    (schema,) = tool_schemas([tool.python])
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]
    text = "<tool_call><function=python><parameter=code>\nx = 6\nprint(x * 7)\n</parameter></function></tool_call>"
    environment = ToolEnvironment([tool.python], tool_call_parser="qwen_xml")
    step = asyncio.run(environment.step(Action(0, [1], text, text, "stop")))
    assert step.observation == [{"role": "tool", "name": "python", "content": "42"}]


def test_a_program_that_hangs_is_ended() -> None:
    quick = PythonTool(timeout=0.5, workers=1, allow_partial_isolation=True)
    assert quick.run("while True: pass") == "Error: the program did not end within 0.5 s"
    quick.close()
