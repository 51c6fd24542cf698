"""``MCPTools``: the tools of a server that speaks the Model Context Protocol, through its official client."""

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhfkit.data.images import Image
from rlhfkit.rollout.event_loop import EventLoopThread
from rlhfkit.validation import check_number

_TYPES: Mapping[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}

Result = str | list[str | Image]
"""Of a tool: its text, or texts and images if there is an image."""


class MCPTools:
    """A connection to an MCP server, whose tools are async functions for ``Episodes(tools=...)``.

    All episodes of a rank share the connection: the server must keep nothing between two calls that episodes should
    not share. Tools run with the server's rights, outside of any sandbox of rlhfkit. Images that they return are read
    by a model that sees; sound and other contents are named (``[audio]``).

    Example::

        tools = MCPTools(["uvx", "mcp-server-time"])
        group = Episodes(tools=tools.functions)
        PromptDataModule(..., chat_template_kwargs={"tools": tools.schemas})

    Args:
        server: Command and arguments of a server that is started and spoken to by its standard input and output, or
            the ``http://`` address of a running one (streamable HTTP).
        names: Tools to take; ``None``: all.
        environment: Environment variables of a started server, besides those that MCP's client passes on.
        timeout: Seconds for the connection, and for each call.

    Raises:
        ValueError: If an argument is out of range; when the tools are asked for, if the server lacks one of ``names``.
        ImportError: When the tools are asked for, if ``mcp`` is not installed.
        ConnectionError: When the tools are asked for, if the server cannot be started or reached.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        names: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        check_number("timeout", timeout, above=0, why="it is in seconds")
        if (isinstance(server, str) and not server.startswith(("http://", "https://"))) or not server:
            raise ValueError(
                f"server must be a command, ['uvx', 'mcp-server-time'], or an http address, got {server!r}"
            )
        self.server = server if isinstance(server, str) else list(server)
        self.names = None if names is None else list(names)
        self.environment = None if environment is None else dict(environment)
        self.timeout = timeout
        self._loop = EventLoopThread("rlhfkit-mcp")
        self._opening = threading.Lock()
        self._end: asyncio.Event | None = None
        self._client: Any = None
        self._functions: list[Callable[..., Awaitable[Result]]] = []
        self._schemas: list[dict[str, Any]] = []

    @property
    def functions(self) -> list[Callable[..., Awaitable[Result]]]:
        """The tools, as async functions with the server's names, descriptions and arguments; connects if needed."""
        self._open()
        return self._functions

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Their JSON schemas, in the form of the template argument ``tools``; connects if needed."""
        self._open()
        return self._schemas

    def _open(self) -> None:
        """Connect, once."""
        with self._opening:
            if self._end is None:
                self._connect()

    def _connect(self) -> None:
        opened: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        # One task opens, serves and closes the connection, as its scopes of cancellation belong to one task.
        self._task = self._loop.submit(self._serve(opened))
        try:
            tools = opened.result(timeout=self.timeout)
        except ImportError:
            self._loop.close()
            raise
        except BaseException as error:
            self._task.cancel()
            self._loop.close()
            reason = str(error) or type(error).__name__
            raise ConnectionError(
                f"no MCP server answers at {self.server} within {self.timeout:g} s: {reason}"
            ) from error
        found = {tool.name: tool for tool in tools}
        missing = [name for name in self.names or () if name not in found]
        if missing:
            self.close()
            raise ValueError(f"the MCP server has no tools {missing}; it has {sorted(found)}")
        chosen = [found[name] for name in self.names or found]
        self._functions = [self._function(tool) for tool in chosen]
        self._schemas = [_schema(tool) for tool in chosen]

    async def _serve(self, opened: "concurrent.futures.Future[list[Any]]") -> None:
        try:
            try:
                from mcp import Client, StdioServerParameters
            except ImportError as error:
                raise ImportError("MCPTools needs mcp: pip install 'rlhfkit[mcp]'") from error
            server: Any = self.server
            if isinstance(server, list):
                server = StdioServerParameters(command=server[0], args=server[1:], env=self.environment)
            async with Client(server) as client:
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
                self._end, self._client = asyncio.Event(), client
                opened.set_result(tools)
                await self._end.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))
            if not isinstance(error, Exception):
                raise

    def _function(self, tool: Any) -> Callable[..., Awaitable[Result]]:
        """Return the async function of a tool, which calls it in the connection's own event loop."""

        async def call(**arguments: Any) -> Result:
            await asyncio.to_thread(self._open)  # in a process of its own, a copy is not connected yet
            return await asyncio.wrap_future(self._loop.submit(self._call(tool.name, arguments)))

        schema = tool.input_schema or {}
        needed = set(schema.get("required") or ())
        call.__name__ = call.__qualname__ = tool.name
        call.__doc__ = tool.description
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if name in needed else None,
                annotation=_TYPES.get(str(described.get("type")), Any) if isinstance(described, Mapping) else Any,
            )
            for name, described in (schema.get("properties") or {}).items()
        ]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> Result:
        result = await self._client.call_tool(name, dict(arguments), read_timeout_seconds=self.timeout)
        parts = [_part(one, f"an image of the MCP tool {name}") for one in result.content]
        texts = ["[image]" if isinstance(part, Image) else part for part in parts]
        if result.is_error:
            raise RuntimeError("\n".join(texts))
        return "\n".join(texts) if texts == parts else parts

    def __reduce__(self) -> Any:
        """Pickle without the connection: the copy opens its own."""
        return _connected, (self.server, self.names, self.environment, self.timeout)

    def close(self) -> None:
        """End the connection, and a server that was started; a second call does nothing."""
        if self._end is None:
            return
        end, self._end = self._end, None

        async def stop() -> None:
            end.set()

        self._loop.submit(stop()).result(timeout=self.timeout)
        concurrent.futures.wait([self._task], timeout=self.timeout)
        self._loop.close()


def _connected(
    server: str | Sequence[str], names: Sequence[str] | None, environment: Mapping[str, str] | None, timeout: float
) -> MCPTools:
    return MCPTools(server, names=names, environment=environment, timeout=timeout)


def _part(content: Any, where: str) -> str | Image:
    """A part of a result: its text, its image, or the name of what is neither."""
    if content.type == "image":
        return Image.of(f"data:{content.mime_type};base64,{content.data}", where)
    return getattr(content, "text", None) or f"[{content.type}]"


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
    return {"type": "function", "function": function}
