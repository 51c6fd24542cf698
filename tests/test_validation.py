"""Checks of numbers: what passes, what is refused, and what the message says."""

import math
from typing import Any

import numpy as np
import pytest

from rlhfkit.validation import check_integer, check_number


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, np.float32(0.25), np.int64(1)])
def test_numbers_within_their_bounds_pass(value: Any) -> None:
    check_number("beta", value, minimum=0, maximum=1)


def test_bounds_are_inclusive_or_exclusive_as_said() -> None:
    check_number("x", 1.0, minimum=1.0, maximum=1.0)
    for bounds in ({"above": 1.0}, {"below": 1.0}, {"minimum": 1.5}, {"maximum": 0.5}):
        with pytest.raises(ValueError, match="x must be a finite number"):
            check_number("x", 1.0, **bounds)


def test_none_and_infinity_pass_where_they_are_allowed() -> None:
    check_number("clip", None, optional=True)
    check_integer("top_k", None, optional=True)
    check_number("tolerance", math.inf, minimum=0, infinite=True)
    with pytest.raises(ValueError, match=r"tolerance must be a number of at least 0, got nan"):
        check_number("tolerance", math.nan, minimum=0, infinite=True)
    check_integer("seed", 10**400, minimum=0)  # no float is as large


def test_the_message_says_value_rule_and_cure() -> None:
    with pytest.raises(TypeError) as caught:
        check_number("lr", "1e-6", above=0, below=1, optional=True, why="a usual rate is 1e-6")
    assert str(caught.value) == (
        "lr must be a finite number above 0 and below 1 or None, got '1e-6' (text; write the number without quotes): "
        "a usual rate is 1e-6"
    )
