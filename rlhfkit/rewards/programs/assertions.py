"""Tests that are evaluated outside of the program: the calls they make, and the conditions on the results.

A test is an expression over calls, such as ``sorted(primes(10)) == [2, 3, 5, 7]``. The program gets the arguments of
one call at a time and returns plain data; it never sees expected values. The evaluator here knows a few operators and
functions on plain data, and executes no code of the test or the program.
"""

import ast
import builtins
import math
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol


class Call(Protocol):
    """Calls a function of the program."""

    def __call__(self, function: str, method: str | None, arguments: list[Any], keywords: dict[str, Any], /) -> Any:
        """Return its value; raises :class:`TestFailed` if it has none."""
        ...


class TestFailed(Exception):
    """The test fails: the program raised, or Python would have raised."""

    __test__ = False  # not collected by pytest


@dataclass(frozen=True)
class CallTest:
    """A call of one of the program's functions, and the expected value."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any = field(hash=False)


@dataclass(frozen=True)
class ParsedAssertions:
    """Assertions that can be evaluated outside; the test passes if all of them hold."""

    source: str
    conditions: tuple[ast.expr, ...]
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Name in the test to the function's name in the program, where they differ."""
    shadowed: str = ""
    """A function of the program with the name of a built-in."""

    def holds(self, condition: int, call: Call) -> bool:
        """Whether one of the conditions holds; raises :class:`TestFailed` if it cannot be evaluated."""
        return bool(_Evaluator(self, call).value(self.conditions[condition]))


@lru_cache(4096)
def parse_assertions(test: str) -> ParsedAssertions | None:
    """Parse a test into assertions that can be evaluated outside; ``None`` if it contains anything else.

    Accepts assert statements, or ``def check(candidate): ...`` of these and a call of it (HumanEval).
    """
    try:
        statements = _relevant(ast.parse(test).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    names: dict[str, str] = {}
    match statements:
        case [
            ast.FunctionDef(
                name=check, args=ast.arguments(args=[ast.arg(arg=candidate)], defaults=[]), body=body, decorator_list=[]
            ),
            ast.Expr(ast.Call(func=ast.Name(id=called), args=[ast.Name(id=function)], keywords=[])),
        ] if check == called:
            statements, names = _relevant(body), {candidate: function}
    conditions = tuple(one.test for one in statements if isinstance(one, ast.Assert))
    if not conditions or len(conditions) != len(statements):
        return None
    called_names = [name for condition in conditions for name in _called_names(condition)]
    shadowed = ""
    if all(name in _OUTSIDE and name not in names for name in called_names):
        if not called_names:
            return None  # it does not call the program
        shadowed = called_names[0]  # the task is to write `sum`, for example
    parsed = ParsedAssertions(test, conditions, names, shadowed)
    return parsed if all(map(_Checker(parsed).known, conditions)) else None


def _relevant(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Remove docstrings, ``pass``, imports of what is known, and HumanEval's ``METADATA``, which test nothing."""

    def idle(one: ast.stmt) -> bool:
        match one:
            case ast.Expr(ast.Constant()) | ast.Pass() | ast.Import(names=[ast.alias(name="math", asname=None)]):
                return True
            case ast.ImportFrom(module="collections" | "decimal" | "fractions", names=names):
                return all(alias.name in _LIBRARY and alias.asname is None for alias in names)
            case ast.Assign(targets=[ast.Name(id="METADATA")]):
                return True
        return False

    return [one for one in statements if not idle(one)]


def _called_names(expression: ast.expr) -> list[str]:
    """Names of the called functions, outermost and leftmost first."""
    return [
        node.func.id for node in ast.walk(expression) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]


# ---------------------------------------------------------------------- supported expressions


_TYPES: dict[str, type] = {
    one.__name__: one for one in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_LIBRARY: dict[str, Callable[..., Any]] = {
    "Counter": Counter, "Decimal": Decimal, "Fraction": Fraction, "OrderedDict": OrderedDict,
    "defaultdict": defaultdict, "deque": deque,
}  # fmt: skip
"""Classes of the standard library that make plain values, which a program that has one of the same name could forge."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "bytearray": bytearray, "dict": dict, "enumerate": enumerate,
    "float": float, "frozenset": frozenset, "int": int, "isinstance": isinstance, "iter": iter, "len": len,
    "list": list, "max": max, "min": min, "next": next, "range": range, "reversed": reversed, "round": round,
    "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple, "zip": zip, **_LIBRARY,
}  # fmt: skip
_OUTSIDE = frozenset({*dir(builtins), *_LIBRARY})
"""Names that are not the program's, unless nothing else is called."""
_MATHS: dict[str, Any] = {
    name: getattr(math, name)
    for name in (
        "ceil",
        "cos",
        "e",
        "exp",
        "floor",
        "inf",
        "isclose",
        "isnan",
        "log",
        "nan",
        "pi",
        "sin",
        "sqrt",
        "tan",
    )
}
_KEYWORDS = {"reverse", "rel_tol", "abs_tol", "ndigits", "start"}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, values: one in values, ast.NotIn: lambda one, values: one not in values,
}  # fmt: skip


@dataclass
class _Checker:
    """Checks that an expression uses only what the evaluator supports."""

    test: ParsedAssertions

    def known(self, node: ast.AST | None) -> bool:
        match node:
            case None | ast.Constant():
                return True
            case ast.Name(id=name):
                return name in _TYPES
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return name in _MATHS
            case ast.Call(func=function, args=arguments, keywords=keywords):
                if any(isinstance(argument, ast.Starred) for argument in arguments):
                    return False
                given = [*arguments, *(keyword.value for keyword in keywords)]
                return self._callable(function, keywords) and all(map(self.known, given))
            case ast.Compare(left=left, ops=ops, comparators=right):
                return all(map(self.known, [left, *right])) and all(map(_known_comparison, ops, right))
            case ast.BinOp(left=left, op=op, right=right_one):
                return type(op) in _BINARY and self.known(left) and self.known(right_one)
            case ast.UnaryOp(operand=operand):
                return self.known(operand)
            case ast.BoolOp(values=values):
                return all(map(self.known, values))
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return all(map(self.known, elements))
            case ast.Dict(keys=keys, values=values):
                return None not in keys and all(map(self.known, [*keys, *values]))
            case ast.Subscript(value=value, slice=ast.Slice(lower=low, upper=high, step=step)):
                return all(map(self.known, [value, low, high, step]))
            case ast.Subscript(value=value, slice=index):
                return self.known(value) and self.known(index)
        return False

    def _callable(self, function: ast.expr, keywords: list[ast.keyword]) -> bool:
        match function:
            case ast.Name(id=name):
                names = {keyword.arg for keyword in keywords}
                if name == self.test.shadowed or name in self.test.names or name not in _OUTSIDE:
                    return None not in names
                return name in _FUNCTIONS and names <= _KEYWORDS
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return callable(_MATHS.get(name))
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[])):  # Solution().solve(...)
                return name not in _OUTSIDE and None not in {keyword.arg for keyword in keywords}
        return False


def _known_comparison(op: ast.cmpop, right: ast.expr) -> bool:
    if isinstance(op, ast.Is | ast.IsNot):  # only with singletons, which are the same object in every process
        return isinstance(right, ast.Constant) and right.value in (None, True, False) and type(right.value) is not int
    return True


# ---------------------------------------------------------------------- the evaluator


@dataclass
class _Evaluator:
    """Evaluates a supported expression on plain data."""

    test: ParsedAssertions
    call: Call

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression; raises :class:`TestFailed` if it has none."""
        try:
            return self._value(node)
        except TestFailed:
            raise
        except Exception as error:  # a wrong type or missing key, as in Python
            raise TestFailed(f"{type(error).__name__}: {error}") from None

    def _value(self, node: ast.AST | None) -> Any:
        match node:
            case None:
                return None
            case ast.Constant(value=constant):
                return constant
            case ast.Name(id=name):
                return _TYPES[name]
            case ast.Attribute(attr=name):
                return _MATHS[name]
            case ast.Call():
                return self._called(node)
            case ast.Compare(left=left, ops=ops, comparators=right):
                return self._compared(self._value(left), ops, right)
            case ast.BinOp(left=left, op=op, right=right_one):
                return _BINARY[type(op)](self._value(left), self._value(right_one))
            case ast.UnaryOp(op=unary, operand=operand):
                return _UNARY[type(unary)](self._value(operand))
            case ast.BoolOp(op=op, values=values):
                return self._first_of(values, isinstance(op, ast.Or))
            case ast.List(elts=elements):
                return list(map(self._value, elements))
            case ast.Tuple(elts=elements):
                return tuple(map(self._value, elements))
            case ast.Set(elts=elements):
                return set(map(self._value, elements))
            case ast.Dict(keys=keys, values=values):
                return dict(zip(map(self._value, keys), map(self._value, values), strict=True))
            case ast.Subscript(value=value, slice=ast.Slice(lower=low, upper=high, step=step)):
                return self._value(value)[slice(*map(self._value, (low, high, step)))]
            case ast.Subscript(value=value, slice=index):
                return self._value(value)[self._value(index)]
        raise TestFailed("not known")

    def _first_of(self, values: list[ast.expr], truth: bool) -> Any:
        """Return the first value with this truth value, else the last: ``or`` with true, ``and`` with false."""
        value: Any = None
        for one in values:
            value = self._value(one)
            if bool(value) is truth:
                break
        return value

    def _called(self, node: ast.Call) -> Any:
        arguments = list(map(self._value, node.args))
        keywords = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
        match node.func:
            case ast.Name(id=name):
                if name in self.test.names or name == self.test.shadowed or name not in _FUNCTIONS:
                    return self.call(self.test.names.get(name, name), None, arguments, keywords)
                return _FUNCTIONS[name](*arguments, **keywords)
            case ast.Attribute(value=ast.Name(), attr=name):
                return _MATHS[name](*arguments, **keywords)
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=method):
                return self.call(name, method, arguments, keywords)
        raise TestFailed("not known")

    def _compared(self, left: Any, ops: list[ast.cmpop], comparators: list[ast.expr]) -> bool:
        for op, right in zip(ops, map(self._value, comparators), strict=True):
            if not _COMPARISONS[type(op)](left, right):
                return False
            left = right
        return True
