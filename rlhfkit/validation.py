"""Checks of number arguments: not a number, not finite or out of range is refused where the argument is given.

A comparison alone lets NaN pass and fails on text with a message about ``<=``. Imports the standard library only.
"""

import math
import numbers
from typing import Any


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
