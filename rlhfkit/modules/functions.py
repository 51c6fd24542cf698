"""Functions as hyperparameters: remembered by name, so that checkpoints hold plain text and no pickled code."""

import pkgutil
from collections.abc import Callable
from typing import Any, cast


def function_name(function: Callable[..., Any]) -> str:
    """The dotted name under which :func:`resolve_function` finds a function again.

    Args:
        function: Any callable.

    Returns:
        E.g. ``"rlhfkit.losses.policy.ppo_loss"``. Of a lambda or a local function a text in angle brackets, which
        cannot be resolved.
    """
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    return name if found is function else f"<{name}: not importable>"


def resolve_function(function: str | Callable[..., Any], argument: str) -> Callable[..., Any]:
    """A callable, or what a dotted name stands for.

    Args:
        function: E.g. ``"rlhfkit.losses.cispo_loss"``, as in YAML.
        argument: Name of the argument, for messages.

    Raises:
        ValueError: If nothing callable has that name.
    """
    if callable(function):
        return function
    if function.startswith("<"):
        raise ValueError(
            f"{argument} was the function {function}, which a checkpoint cannot hold: pass it again, e.g. "
            f"load_from_checkpoint(..., {argument}=my_function), or define it at the top of a module"
        )
    try:
        found = pkgutil.resolve_name(function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}={function!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{argument}={function!r} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)
