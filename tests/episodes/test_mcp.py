"""Tools of a real MCP server, of the official package, in a process of its own."""

import asyncio
import pickle
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhfkit.episodes import Action, MCPTools, ToolEnvironment

pytestmark = pytest.mark.skipif(not find_spec("mcp"), reason="MCPTools needs the official client, rlhfkit[mcp]")

SERVER = '''
import io

import PIL.Image
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test")
calls = 0


@server.tool()
def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(f"no {text}")


@server.tool()
def look(size: int) -> list:
    """A red picture and its caption."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (size, size), "red").save(file, format="PNG")
    return ["red", Image(data=file.getvalue(), format="png")]


server.run("stdio")
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file: Path = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    return [sys.executable, str(file)]


@pytest.fixture(scope="module")
def tools(command: list[str]) -> Iterator[MCPTools]:
    made = MCPTools(command, names=["fail", "add", "look"], timeout=120)
    assert [tool.__name__ for tool in made.functions] == ["fail", "add", "look"]
    yield made
    made.close()


def test_tools_are_called_by_a_policy_errors_told_and_images_read_as_those_of_python_tools(tools: MCPTools) -> None:
    environment = ToolEnvironment(tools.functions, timeout=60)
    calls = [
        '{"name": "add", "arguments": {"a": 3}}',
        '{"name": "add", "arguments": {"a": 3, "b": 4}}',
        '{"name": "fail", "arguments": {"text": "way"}}',
        '{"name": "add", "arguments": {"c": 3}}',
        '{"name": "look", "arguments": {"size": 28}}',
    ]
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    step = asyncio.run(environment.step(Action(0, [1], text, text, "stop")))
    *contents, (caption, seen) = [message["content"] for message in step.observation or ()]  # type: ignore[index,call-overload]
    assert contents[:2] == ["5", "7"]
    assert "Error executing tool fail" in contents[2]
    assert "missing a required argument: 'a'" in contents[3]
    assert step.info == {"tool_calls": 5, "tool_errors": 2}
    assert caption == {"type": "text", "text": "red"}
    opened = seen["image"].open()
    assert (opened.size, opened.getpixel((0, 0))) == ((28, 28), (255, 0, 0))
    assert seen["image"].where == "an image of the MCP tool look"


def test_schemas_are_the_servers(tools: MCPTools) -> None:
    schemas = {one["function"]["name"]: one["function"] for one in tools.schemas}
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert schemas["add"]["parameters"]["required"] == ["a"]


def test_a_copy_connects_by_itself_and_missing_tools_are_named(tools: MCPTools, command: list[str]) -> None:
    copy = pickle.loads(pickle.dumps(tools))
    assert [tool.__name__ for tool in copy.functions] == ["fail", "add", "look"]
    copy.close()
    copy.close()
    with pytest.raises(ValueError, match=r"has no tools \['more'\]; it has \['add', 'fail', 'look'\]"):
        _ = MCPTools(command, names=["more"], timeout=120).functions


def test_nobody_there() -> None:
    with pytest.raises(ConnectionError, match="no MCP server answers at"):
        _ = MCPTools([sys.executable, "-c", "raise SystemExit(1)"], timeout=20).schemas
