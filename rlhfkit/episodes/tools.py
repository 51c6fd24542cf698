"""``ToolEnvironment``: the policy calls Python functions, reads their results, and then answers."""

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from rlhfkit.data.images import Image
from rlhfkit.episodes.environment import Action, Environment, Message, Step
from rlhfkit.episodes.tool_calls import ToolCall, ToolCallParser
from rlhfkit.episodes.tool_calls import tool_call_parser as find_parser
from rlhfkit.rollout.event_loop import call_with_timeout
from rlhfkit.validation import check_integer, check_number


def tool_schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return JSON schemas of functions, from type hints and docstrings, in the form of the template argument ``tools``.

    Example::

        PromptDataModule(..., chat_template_kwargs={"tools": tool_schemas([search])})

    Args:
        tools: Functions with type hints and a Google-style docstring that describes each argument.

    Raises:
        ValueError: If one lacks them.
    """
    from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"tool {getattr(tool, '__name__', tool)!r} needs type hints and a docstring with an Args section: "
                f"{error}"
            ) from error
    return schemas


class ToolEnvironment(Environment):
    """Runs the tools that an action calls and returns their results as messages; an action without calls is the answer.

    If a tool raises, times out, does not exist or gets wrong arguments, a message to the policy says so. Subclass it
    for a reward, or for tools with state (bound methods can be tools). A tool for a model that sees may return a Pillow
    image, an :class:`~rlhfkit.data.images.Image`, or a list of texts and images.

    Tools run in this process. To run code that the policy has written, use a function that runs it in a sandbox.

    Example::

        def multiply(a: int, b: int) -> int:
            ...  # with a docstring that says what a and b are


        Episodes(tools=[multiply])

    Args:
        tools: Functions, called by their names; plain ones run in a thread each, async ones in the event loop.
        tool_call_parser: Finds the calls in an action: a name (``hermes``, ``llama3_json``, ``mistral``, ``deepseek``,
            ``qwen_xml``, ``pythonic``) or a function. :class:`Episodes` finds it from the chat template.
        timeout: Time limit in seconds of each call.
        max_result_characters: A longer result is truncated.
        role: Role of the messages; use ``"user"`` for templates without tools.

    Raises:
        ValueError: If there is no tool, one has no name or schema, two have the same name, or a limit is out of range.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        *,
        tool_call_parser: str | ToolCallParser = "hermes",
        timeout: float = 30.0,
        max_result_characters: int = 8000,
        role: str = "tool",
    ) -> None:
        self.tools = {getattr(tool, "__name__", ""): tool for tool in tools}
        if not tools or "" in self.tools or len(self.tools) < len(tools):
            raise ValueError(f"tools must be one or more functions of different names, got {list(tools)!r}")
        check_number("timeout", timeout, above=0, why="it is in seconds")
        check_integer("max_result_characters", max_result_characters, minimum=1)
        self.tool_call_parser = find_parser(tool_call_parser)
        self.timeout = timeout
        self.max_result_characters = max_result_characters
        self.role = role

    async def step(self, action: Action) -> Step:
        """Run the called tools concurrently."""
        calls = list(self.tool_call_parser(action))
        if not calls:
            reward = self.answer_reward(action)
            return Step(reward=await reward if inspect.isawaitable(reward) else reward, done=True)
        outcomes = await asyncio.gather(*map(self._run, calls))
        messages: list[Message] = [
            {"role": self.role, "name": wanted.name, "content": content}
            for wanted, (content, _) in zip(calls, outcomes, strict=True)
        ]
        failed = sum(not worked for _, worked in outcomes)
        return Step(messages, info={"tool_calls": len(calls), "tool_errors": failed})

    def answer_reward(self, action: Action) -> Any:
        """Return the reward of an answer, an action without calls: 0. Override it, with an async method if needed."""
        return 0.0

    async def _run(self, wanted: ToolCall) -> tuple[str | list[dict[str, Any]], bool]:
        """Return the result of one call, a text or its parts with images, and whether it succeeded."""
        tool = self.tools.get(wanted.name)
        if wanted.error:
            return f"Error: {wanted.error}", False
        if tool is None:
            return f"Error: there is no tool {wanted.name!r}; there are {', '.join(self.tools)}", False
        wanted = wanted.typed(partial(_types_of, tool))
        try:
            inspect.signature(tool).bind(**wanted.arguments)
        except TypeError as error:
            return f"Error: {wanted.name}: {error}", False
        bound = partial(tool, **wanted.arguments)  # async if the tool is
        try:
            result = await call_with_timeout(bound, timeout=self.timeout, description=f"tool {wanted.name}")
        except Exception as error:
            return self._short(f"Error: {type(error).__name__}: {error}"), False
        parts = result if isinstance(result, list | tuple) else [result]
        if any(map(_is_image, parts)):
            return [self._part(one) for one in parts], True
        return self._text(result), True

    def _part(self, value: Any) -> dict[str, Any]:
        if _is_image(value):
            return {"type": "image", "image": value}
        return {"type": "text", "text": self._text(value)}

    def _text(self, result: Any) -> str:
        return self._short(result if isinstance(result, str) else json.dumps(result, default=str))

    def _short(self, text: str) -> str:
        limit = self.max_result_characters
        return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


def _is_image(value: Any) -> bool:
    """Whether a value is an image of ours or of Pillow, which may not be installed."""
    return isinstance(value, Image) or (callable(getattr(value, "save", None)) and hasattr(value, "mode"))


_JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    **dict.fromkeys((list, tuple, set), "array"),
}


def _types_of(tool: Callable[..., Any], name: str) -> Set[str]:
    """The types of JSON that an argument of a tool takes, by its type hint; text for an unknown argument."""
    parameters = inspect.signature(tool).parameters
    if name not in parameters:
        return {"string"}
    try:
        hint = typing.get_type_hints(tool).get(name, Any)
    except (NameError, TypeError):  # a name that exists for type checkers only
        hint = str if parameters[name].annotation == "str" else Any
    return _types_of_hint(hint)


def _types_of_hint(hint: Any) -> Set[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        every = [_types_of_hint(part) for part in typing.get_args(hint)]
        return set().union(*every) if all(every) else set()
    if origin is typing.Literal:
        return {_JSON_TYPES[type(value)] for value in typing.get_args(hint) if type(value) in _JSON_TYPES}
    found = _JSON_TYPES.get(origin or hint)
    return set() if found is None else {found}
