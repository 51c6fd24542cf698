"""Checks of arguments where they are given: numbers, dataclasses of options, and functions that are given by name.

A comparison alone lets NaN pass and fails on text with a message about ``<=``. Imports the standard library only.
"""

import difflib
import functools
import math
import numbers
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar, cast

from rlhfkit.argument_names import hint

Options = TypeVar("Options")


def check_number(
    name: str,
    value: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    optional: bool = False,
    infinite: bool = False,
    why: str = "",
) -> None:
    """Raise unless a value is a real number within its bounds; booleans are not numbers, scalars of NumPy are.

    ``above`` and ``below`` are exclusive. ``optional`` allows ``None``, ``infinite`` infinity but not NaN. ``why`` is
    appended to the message.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is NaN, infinite, or out of bounds.
    """
    if value is None and optional:
        return
    bounds = _bounds(minimum, above, maximum, below)
    rule = " ".join(["a number" if infinite else "a finite number", *bounds]) + (" or None" if optional else "")
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(_message(name, rule, value, why))
    if value != value or (not infinite and abs(value) == math.inf) or _outside(value, minimum, above, maximum, below):
        raise ValueError(_message(name, rule, value, why))


def check_integer(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    optional: bool = False,
    why: str = "",
) -> None:
    """Raise unless a value is an integer within its bounds; booleans and floats such as ``8.0`` are not, NumPy's are.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it is NaN, infinite, or out of bounds.
    """
    if value is None and optional:
        return
    rule = " ".join(["an integer", *_bounds(minimum, None, maximum, None)]) + (" or None" if optional else "")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        finite = not isinstance(value, float) or math.isfinite(value)
        raise (TypeError if finite else ValueError)(_message(name, rule, value, why))
    if _outside(value, minimum, None, maximum, None):
        raise ValueError(_message(name, rule, value, why))


def _bounds(minimum: float | None, above: float | None, maximum: float | None, below: float | None) -> list[str]:
    """The bounds in words."""
    lower = [] if minimum is None else [f"of at least {minimum:g}"]
    lower += [] if above is None else [f"above {above:g}"]
    upper = [] if maximum is None else [f"at most {maximum:g}"]
    upper += [] if below is None else [f"below {below:g}"]
    return [*lower, *(["and"] if lower and upper else []), *upper]


def _outside(
    value: Any, minimum: float | None, above: float | None, maximum: float | None, below: float | None
) -> bool:
    return (
        (minimum is not None and value < minimum)
        or (above is not None and value <= above)
        or (maximum is not None and value > maximum)
        or (below is not None and value >= below)
    )


def _message(name: str, rule: str, value: Any, why: str) -> str:
    shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    kind = " (text; write the number without quotes)" if isinstance(value, str) else ""
    if not isinstance(value, str | numbers.Number) and value is not None:
        kind = f" ({type(value).__name__})"
    return f"{name} must be {rule}, got {shown}{kind}" + (f": {why}" if why else "")


def refuse_without_effect(given: Mapping[str, bool], beside: str) -> None:
    """Raise ValueError if arguments were given that have no effect because of another one.

    ``given`` says by name whether each was given; ``beside`` is the other argument, as the user wrote it.
    """
    names = [name for name, chosen in given.items() if chosen]
    if names:
        raise ValueError(f"{', '.join(names)} would have no effect beside {beside}: leave out the one or the other")


def options(kind: type[Options], value: Options | Mapping[str, Any] | None) -> Options:
    """Return an options dataclass given as an instance, as a mapping of its fields (from a checkpoint), or as ``None``.

    Raises TypeError if it is something else, and ValueError if the mapping has other names.
    """
    if value is None:
        return kind()
    known = [field.name for field in fields(cast(Any, kind))]
    if not isinstance(value, Mapping):
        if not isinstance(value, kind):
            raise TypeError(f"give {kind.__name__}(...) or a mapping of {', '.join(known)}; got {value!r:.200}")
        return value
    unknown = sorted({*value} - {*known})
    if unknown:
        guesses = "; ".join(filter(None, (hint(name, known) for name in unknown)))
        listed = f"{kind.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}"
        raise ValueError(listed + (f": {guesses}" if guesses else ""))
    return kind(**value)


def function_name(function: Callable[..., Any]) -> str:
    """The dotted name by which :func:`resolve_function` finds a function, e.g. ``"my_package.my_loss"``.

    Lambdas, local functions and partials give a description in angle brackets, which cannot be resolved.
    """
    if isinstance(function, functools.partial):
        return f"<functools.partial of {function_name(function.func)}: not importable>"
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    return name if found is function else f"<{name}: not importable>"


class AnyFunction(Protocol):
    """Whatever can be called.

    For a ``Callable`` with types of arguments jsonargparse 4 makes what a ``class_path`` names, and refuses a function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        ...


GivenFunction = str | Mapping[str, Any] | AnyFunction
"""A function, its dotted name, or as in YAML ``{class_path: ..., init_args: ...}`` of one that takes more arguments, or
of a class whose objects are called."""


def resolve_function(function: GivenFunction, argument: str, *, home: str | None = None) -> Callable[..., Any]:
    """Return a function that is given in one of these ways; raises ValueError if nothing callable has the name.

    ``argument`` is for error messages; names without a dot are looked up in the package ``home``.
    """
    if isinstance(function, Mapping):
        return with_arguments(*named_function(function, argument, home=home))
    if callable(function):
        return function
    if function.startswith("<"):
        raise ValueError(
            f"{argument} was the function {function}, which a checkpoint cannot hold: pass it again, e.g. "
            f"load_from_checkpoint(..., {argument}=my_function), or define it at the top of a module"
        )
    name = f"{home}.{function}" if home is not None and "." not in function else function
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}={function!r} cannot be imported: {error}{_suggestion(name, home)}") from error
    if not callable(found):
        raise ValueError(f"{argument}={function!r} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def function_or_name(function: GivenFunction, argument: str, *, home: str | None = None) -> Any:
    """:func:`resolve_function`, but a name without a dot, which is the caller's own, stays as it is."""
    is_name = isinstance(function, str) and "." not in function and not function.startswith("<")
    return function if is_name else resolve_function(function, argument, home=home)


def named_function(
    function: GivenFunction, argument: str, *, home: str | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function or class that is meant, and the keyword arguments that come with it; as :func:`resolve_function`."""
    if isinstance(function, functools.partial) and not function.args:
        return function.func, dict(function.keywords)
    if not isinstance(function, Mapping):
        return resolve_function(function, argument, home=home), {}
    if {*function} - {"class_path", "init_args"} or not isinstance(function.get("class_path"), str):
        raise ValueError(f"a function or a part is {{class_path: ..., init_args: {{...}}}}, got {dict(function)}")
    return resolve_function(function["class_path"], argument, home=home), dict(function.get("init_args") or {})


def with_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with keyword arguments set; of a class, an object that is made with them and called."""
    if isinstance(function, type):
        return cast(Callable[..., Any], function(**arguments))
    return functools.partial(function, **arguments) if arguments else function


def _suggestion(name: str, home: str | None) -> str:
    """A hint for an error message if the name resembles a public function of the home."""
    if home is None or not name.startswith(f"{home}."):
        return ""
    public = pkgutil.resolve_name(home).__all__
    asked = name.removeprefix(f"{home}.")
    near = [each for each in public if each.startswith(f"{asked}_")] or difflib.get_close_matches(asked, public, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
