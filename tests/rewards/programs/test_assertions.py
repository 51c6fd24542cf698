"""Tests that are evaluated outside of the program: equality, supported assertions. Covers ``values.py`` too."""

import array
import json
import random
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rlhfkit.rewards.programs.assertions import TestFailed, parse_assertions
from rlhfkit.rewards.programs.values import MAX_DEPTH, MAX_ELEMENTS, OpaqueValue, dumps, loads

Pair = namedtuple("Pair", "a b")


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
        return all(parsed.holds(condition, call) for condition in range(len(parsed.conditions)))
    except TestFailed:
        return False


def nested(depth: int) -> list[Any]:
    """``[[[]]]`` for 3."""
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


class Solution:
    def solve(self, numbers: list[int]) -> int:
        return sum(numbers)


@pytest.mark.parametrize(
    ("test", "function", "holds"),
    [
        ("assert f(1, 2) == 3", lambda a, b: a + b, True),
        ("assert f(1, b=2) == 3, 'wrong'", lambda a, b: a + b, True),
        ("assert f([1, 2]) == (1, 2)", list, False),
        ("assert f(1) == True", lambda n: n, True),
        ("assert f(1) is True", lambda n: n, False),
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
        ("assert list(f(3)) == [0, 1, 2]", lambda n: (i for i in range(n)), True),
        ("assert f(3) == [0, 1, 2]", lambda n: (i for i in range(n)), False),
        ("assert next(f(3)) == '0' and sum(map) == 3", lambda n: n, "free"),
        ("assert f(2) == deque([0, 1])", lambda n: deque(range(n)), True),
        ("assert f(2) == [0, 1]", lambda n: deque(range(n)), False),
        ("assert list(f(3)) == [0, 1, 2] and f(3)[1:][0] == 1", lambda n: array.array("i", range(n)), True),
        ("assert f(3) == [0, 1, 2]", lambda n: array.array("i", range(n)), False),
        ("assert list(f(3)) == [0, 1, 2] and len(f(2)) == 2", np.arange, True),
        ("assert f({2: 1}) == {2}", lambda d: d.keys(), True),
        ("assert sorted(f({2: 5, 1: 2})) == [2, 5]", lambda d: d.values(), True),
        ("assert sorted(f({2: 5, 1: 2})) == [(1, 2), (2, 5)]", lambda d: d.items(), True),
        ("assert f(1, 2) == 0.5 and f(1, 3) == Fraction(1, 3)", Fraction, True),
        ("from decimal import Decimal\nassert f('0.5') == 0.5 and f('0.1') == Decimal('0.1')", Decimal, True),
        ("assert f('0.1') == 0.1", Decimal, False),
        ("assert f(2) == b'ab' and f(2)[0] == 97", lambda n: bytearray(b"ab"), True),
        ("assert f('aab') == Counter('aba')", Counter, True),
        ("assert f(16000) == 2**16000 and f(16000) != 2**16001", lambda n: 2**n, True),
        ("assert f(0) == " + "[" * 150 + "]" * 150, lambda n: nested(150), True),
        ("assert f(0) == " + "[" * 150 + "]" * 150, lambda n: nested(151), False),
        ("assert len(f(0)) == 1", lambda n: nested(2 * MAX_DEPTH), True),
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


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 2.5, "a", b"a", bytearray(b"a"), 1j, [1], (1,), {1}, frozenset({1}), {"a": [1]}, "", False,
     [(1, "a")], float("inf"), -(3**9000), range(9, 1, -2), Fraction(1, 3), Decimal("0.10"), deque([1, (2,)]),
     nested(MAX_DEPTH - 3)],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_values_come_back_as_they_were(value: object) -> None:
    assert loads(dumps(value)) == value
    assert type(loads(dumps(value))) is type(value)
    assert loads(dumps([value, {1: (value,)}])) == [value, {1: (value,)}]


def test_what_cannot_be_carried_over_names_its_type_and_equals_nothing() -> None:
    endless = (n for n in iter(int, 1))
    found: list[str] = []
    plain = loads(dumps([object(), endless, nested(MAX_DEPTH)]), found)
    assert found == ["object", f"generator of more than {MAX_ELEMENTS} elements", f"list inside {MAX_DEPTH} containers"]
    assert not plain[0] == plain[0]  # noqa: SIM201
    assert not plain[0] != plain[0]  # noqa: SIM202
    assert plain[0]


@pytest.mark.parametrize("library", ["Counter", "Decimal", "Fraction", "OrderedDict", "deque"])
def test_a_programs_own_class_of_a_librarys_name_judges_nothing(library: str) -> None:
    values = {"Counter": "'ab'", "Decimal": "'1.5'", "Fraction": "1, 2", "OrderedDict": "[(1, 2)]", "deque": "[1]"}
    forged = {library: lambda *given: 0, "f": lambda n: 0}
    assert outcome(f"assert f(1) == {library}({values[library]})", **forged) is False
    assert outcome(f"assert {library}({values[library]}) == 0", **forged) is True  # the task is to write it


def test_subclasses_become_plain_and_own_equality_counts_for_nothing() -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    given = [Equal(3), Pair(1, Equal(2)), OrderedDict(a=1), np.float64(0.5), np.int64(7), np.bool_(True)]
    assert loads(dumps(given)) == [3, (1, 2), {"a": 1}, 0.5, 7, True]
    assert [type(one) for one in loads(dumps(given))] == [int, tuple, dict, float, int, bool]


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "{}", '{"tuple": 3}', '{"set": [[]]}', '{"dict": [[1]]}', '{"dict": [[[], 1]]}', '{"bytes": "xy"}',
        '{"no": []}', '{"tuple": [], "list": []}', '{"complex": [1]}', '{"other": ["a"]}', '{"complex": ["1", 2.0]}',
        "[" * 2000 + "]" * 2000, "[" * 100_000, '{"range": [0, 1, 0]}', '{"range": [0.0, 1, 1]}', "1" * 5000,
        '{"int": "9x"}', '{"int": 9}', '{"fraction": [1, 0]}', '{"fraction": [1]}', '{"decimal": "x"}',
        '{"items": [1]}', '{"array": "ab"}', '{"keys": [[]]}', '{"other": [1, true]}', "not json",
        '{"raised": "ValueError"}',
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of JSON's kind or ours
        loads(text)


def test_texts_at_random_are_values_or_refused() -> None:
    chosen = random.Random(0)
    words = [*"[]{},:1", '"tuple"', '"set"', '"dict"', '"a"', "null", "1e999", "-0.0", '"other"', "true"]
    for _ in range(3000):
        text = "".join(chosen.choices(words, k=chosen.randrange(1, 12)))
        try:
            value = loads(text)
        except ValueError:
            continue
        assert isinstance(value, OpaqueValue) or json.loads(dumps(value)) == json.loads(dumps(loads(dumps(value))))
