"""``ToolCall``: a function call of the policy, as any format of models writes it."""

from collections.abc import Callable, Mapping, Sequence
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

    def typed(self, is_text: Callable[[str], bool]) -> "ToolCall":
        """Parse the texts of an untyped call as JSON where they are some and the argument takes no text.

        Args:
            is_text: Whether an argument of this name takes text.
        """
        if not self.untyped:
            return self
        arguments = {name: value if is_text(name) else _value(value) for name, value in self.arguments.items()}
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


def _value(text: Any) -> Any:
    try:
        return parse_json(text) if isinstance(text, str) else text
    except ValueError:
        return text
