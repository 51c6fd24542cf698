"""``ToolCall``: a function call of the policy, as any format of models writes it."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from rlhfkit.episodes.environment import Action
from rlhfkit.episodes.json_limits import parse_json


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
