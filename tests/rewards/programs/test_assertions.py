"""Tests that are evaluated outside of the program: equality, supported assertions. Covers ``values.py`` too."""

import json
import random
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

from rlhfkit.rewards.programs.assertions import TestFailed, equal_values, parse_assertions
from rlhfkit.rewards.programs.values import MAX_RANGE_LENGTH, OpaqueValue, dumps, loads

Pair = namedtuple("Pair", "a b")
VALUES = [
    None,
    True,
    1,
    2.5,
    "a",
    b"a",
    1j,
    [1],
    (1,),
    {1},
    {"a": 1},
    [],
    (),
    {},
    "",
    0,
    False,
    [(1, "a")],
    float("inf"),
]


def outcome(test: str, **functions: Any) -> bool | str:
    """Of a test of functions that are called here; "free" if it is not evaluated outside."""
    parsed = parse_assertions(test)
    if parsed is None:
        return "free"

    def call(function: str, method: str | None, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if function not in functions:
            raise TestFailed(function)
        target = functions[function] if method is None else getattr(functions[function](), method)
        return loads(dumps(target(*loads(dumps(arguments)), **loads(dumps(keywords)))))

    try:
        return parsed.passes(call)
    except TestFailed:
        return False


class Solution:
    def solve(self, numbers: list[int]) -> int:
        return sum(numbers)


@pytest.mark.parametrize(
    ("test", "function", "holds"),
    [
        ("assert f(1, 2) == 3", lambda a, b: a + b, True),
        ("assert f(1, b=2) == 3, 'wrong'", lambda a, b: a + b, True),
        ("assert f([1, 2]) == (1, 2)", list, False),
        ("assert f([1, 2]) == (1, 2)", tuple, True),
        ("assert f(3) == 3.0", float, True),
        ("assert f(1) == True", lambda n: n, False),
        ("assert f(1) == True", bool, True),
        ("assert f(1) is True", bool, True),
        ("assert f(0) is None and not f(1)", lambda n: None, True),
        ("assert set(f([3, 3, 4])) == set((3, 4))", lambda n: n, True),
        ("assert sorted(f((2, 1)), reverse=True) == [2, 1]", lambda n: list(n), True),
        ("assert abs(f(2) - 1.41421) < 1e-4", lambda n: n**0.5, True),
        ("import math\nassert math.isclose(f(2), math.sqrt(2), rel_tol=1e-9)", lambda n: n**0.5, True),
        ("assert f(f(2)) == 16", lambda n: n**2, True),
        ("assert f(range(3)) == list(range(3))", list, True),
        ("assert f([])['a'][0] == -2 ** 2 + 7 % 4", lambda n: {"a": [-1]}, True),
        ("assert 3 in f(0) and 'b' not in f(0)", lambda n: [1, 3], True),
        ("assert 1 < f(0) <= 2", lambda n: 2, True),
        ("assert isinstance(f(0), (int, str))", str, True),
        ("assert f('x') == 'x'\nassert f('y') == 'z'", lambda n: n, False),
        ("assert f([1]) == [1]", lambda n: Counter, False),
        ("assert f('aab') == {'a': 2, 'b': 1}", Counter, True),
        ("assert f(2) < 'a'", lambda n: n, False),
        ("assert f(2) != 3", lambda n: object(), False),
        ("assert f(0) == [10**20, float('-inf')]", lambda n: [10**20, -float("inf")], True),
    ],
)
def test_what_python_asserts_of_plain_values_holds(test: str, function: Any, holds: bool) -> None:
    assert outcome(test, f=function) is holds


def test_forms_of_known_data_sets_are_judged_outside() -> None:
    check = 'METADATA = {"author": "a"}\n\ndef check(candidate):\n    """It."""\n    assert candidate(2) == 4\n'
    check += "    assert candidate(3) == 9, 'three'\n    assert True\n\ncheck(square)\n"
    assert outcome(check, square=lambda n: n * n) is True
    assert outcome(check, square=lambda n: 4) is False
    assert outcome("assert Solution().solve([1, 2]) == 3", Solution=Solution) is True
    assert outcome("assert sum(10, 15) == 25", sum=lambda a, b: a + b) is True
    assert outcome("assert sum([f(1), f(2)]) == 3", f=lambda n: n, sum=lambda n: 3 / 0) is True


@pytest.mark.parametrize(
    "test",
    [
        "assert True",
        "assert f",
        "x = f(1)\nassert x == 1",
        "assert f(lambda n: n) == 1",
        "assert f(Pair(1, 2)).a == 1",
        "assert [f(n) for n in (1, 2)] == [1, 2]",
        "for n in (1, 2):\n    assert f(n) == n",
        "def check(candidate):\n    assert candidate(1) == 1",
        "assert type(f(1)) == int",
        "assert f(*[1]) == 1",
        "assert f(1) is f(1)",
        "assert eval('f(1)') == f(1)",
        "assert f(1) ==",
        "assert " + "(" * 500 + "f(1)" + ")" * 500,
        "f(1)",
    ],
)
def test_what_is_more_than_calls_with_plain_values_is_free(test: str) -> None:
    assert outcome(test, f=lambda n: n) == "free"


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_equal_themselves_and_nothing_else(value: object) -> None:
    assert equal_values(loads(dumps(value)), value)
    assert type(loads(dumps(value))) is type(value)
    others = [other for other in VALUES if other is not value]
    assert [other for other in others if equal_values(value, other)] == []
    assert [other for other in others if equal_values([value], [other])] == []
    assert [other for other in others if equal_values({"k": value}, {"k": other})] == []


def test_what_agrees_is_equal_in_python_and_what_is_equal_agrees_but_for_booleans() -> None:
    chosen = random.Random(1)

    def value(depth: int = 3) -> Any:
        kind = chosen.choice(["leaf"] * 3 + ["list", "tuple", "set", "dict"]) if depth else "leaf"
        if kind == "leaf":
            return chosen.choice([0, 1, 2, 0.0, 1.0, "a", "b", None, b"a", True, False])
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](value(depth - 1) for _ in range(chosen.randrange(3)))
        leaves = [value(0) for _ in range(chosen.randrange(3))]
        return set(leaves) if kind == "set" else {leaf: value(depth - 1) for leaf in leaves}

    agreeing = 0
    for _ in range(20_000):
        left, right = value(2), value(2)
        agreeing += equal_values(left, right)
        if equal_values(left, right):
            assert left == right
        elif left == right:
            assert "True" in f"{left}{right}" or "False" in f"{left}{right}"
    assert agreeing > 500


def test_subclasses_become_plain_and_own_equality_counts_for_nothing() -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    given = [Equal(3), Pair(1, Equal(2)), OrderedDict(a=1), np.float64(0.5), np.int64(7), np.bool_(True)]
    assert loads(dumps(given)) == [3, (1, 2), {"a": 1}, 0.5, 7, True]
    assert [type(one) for one in loads(dumps(given))] == [int, tuple, dict, float, int, bool]
    opaque = loads(dumps(object()))
    assert opaque == OpaqueValue("object", True) or isinstance(opaque, OpaqueValue)
    assert not equal_values(opaque, opaque)


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "{}", '{"tuple": 3}', '{"set": [[]]}', '{"dict": [[1]]}', '{"dict": [[[], 1]]}', '{"bytes": "xy"}',
        '{"no": []}', '{"tuple": [], "list": []}', '{"complex": [1]}', '{"other": ["a"]}', '{"complex": ["1", 2.0]}',
        "[" * 200 + "]" * 200, "[" * 100_000, f'{{"range": [0, {MAX_RANGE_LENGTH + 1}, 1]}}', '{"range": [0, 1, 0]}',
        '{"range": [0.0, 1, 1]}', "1" * 5000, "not json", '{"raised": "ValueError"}',
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of JSON's kind or ours
        loads(text)


def test_texts_at_random_are_values_or_refused() -> None:
    chosen = random.Random(0)
    words = [
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        '"tuple"',
        '"set"',
        '"dict"',
        '"a"',
        "1",
        "null",
        "1e999",
        "-0.0",
        '"other"',
        "true",
    ]
    for _ in range(3000):
        text = "".join(chosen.choices(words, k=chosen.randrange(1, 12)))
        try:
            value = loads(text)
        except ValueError:
            continue
        assert isinstance(value, OpaqueValue) or json.loads(dumps(value)) == json.loads(dumps(loads(dumps(value))))


def test_hostile_values_cost_no_more_than_their_text() -> None:
    assert outcome("assert f(0) * 10 == 0", f=lambda n: "x" * 200_000) is False
    assert outcome("assert f(0) ** f(0) == 0", f=lambda n: 10**9) is False
    assert outcome("assert list(range(f(0))) == []", f=lambda n: 10**12) is False
    assert outcome("assert '%s' % f(0) == ''", f=lambda n: 10**9) is False
