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


Value = Callable[[Call], Any]
"""Computes the value of an expression, with calls of the program."""


@dataclass(frozen=True)
class ParsedAssertions:
    """Assertions that can be evaluated outside; the test passes if all of them hold."""

    source: str
    conditions: tuple[Value, ...]

    def holds(self, condition: int, call: Call) -> bool:
        """Whether one of the conditions holds; raises :class:`TestFailed` if it cannot be evaluated."""
        try:
            return bool(self.conditions[condition](call))
        except TestFailed:
            raise
        except Exception as error:  # a wrong type or missing key, as in Python
            raise TestFailed(f"{type(error).__name__}: {error}") from None


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
    expressions = _Expressions(names, shadowed)
    try:
        return ParsedAssertions(test, tuple(map(expressions.value, conditions)))
    except (_UnsupportedError, RecursionError):
        return None


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
        "ceil", "cos", "e", "exp", "floor", "inf", "isclose", "isnan", "log", "nan", "pi", "sin", "sqrt", "tan",
    )
}  # fmt: skip
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


class _UnsupportedError(Exception):
    """An expression is none of those that are evaluated here."""


@dataclass
class _Expressions:
    """Turns supported expressions into functions on plain data; others raise :class:`_UnsupportedError`."""

    names: Mapping[str, str]
    """Name in the test to the function's name in the program, where they differ."""
    shadowed: str
    """A function of the program with the name of a built-in."""

    def value(self, node: ast.AST | None) -> Value:
        match node:
            case None:
                return lambda call: None
            case ast.Constant(value=constant):
                return lambda call: constant
            case ast.Name(id=name) if name in _TYPES:
                return lambda call: _TYPES[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATHS:
                return lambda call: _MATHS[name]
            case ast.Call():
                return self._called(node)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(map(_known_comparison, ops, others)):
                return self._compared(left, [_COMPARISONS[type(op)] for op in ops], others)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._applied(_BINARY[type(op)], left, right)
            case ast.UnaryOp(op=unary, operand=operand):
                return self._applied(_UNARY[type(unary)], operand)
            case ast.BoolOp(op=op, values=values):
                return self._first_of(values, isinstance(op, ast.Or))
            case ast.List(elts=elements):
                return self._applied(lambda *given: list(given), *elements)
            case ast.Tuple(elts=elements):
                return self._applied(lambda *given: given, *elements)
            case ast.Set(elts=elements):
                return self._applied(lambda *given: set(given), *elements)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = [node for pair in zip(keys, values, strict=True) for node in pair]
                return self._applied(lambda *given: dict(zip(given[::2], given[1::2], strict=True)), *pairs)
            case ast.Subscript(value=value, slice=ast.Slice(lower=low, upper=high, step=step)):
                return self._applied(lambda given, *bounds: given[slice(*bounds)], value, low, high, step)
            case ast.Subscript(value=value, slice=index):
                return self._applied(operator.getitem, value, index)
        raise _UnsupportedError

    def _applied(self, function: Callable[..., Any], *nodes: ast.AST | None) -> Value:
        """The value of a function of the nodes' values, which are computed from left to right."""
        values = [self.value(node) for node in nodes]
        return lambda call: function(*[value(call) for value in values])

    def _called(self, node: ast.Call) -> Value:
        arguments = [self.value(argument) for argument in node.args]
        names = {keyword.arg for keyword in node.keywords}
        if None in names:  # **keywords
            raise _UnsupportedError
        keywords = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
        known: Callable[..., Any] | None = None
        method: str | None = None
        match node.func:
            case ast.Name(id=name) if name == self.shadowed or name in self.names or name not in _OUTSIDE:
                name = self.names.get(name, name)
            case ast.Name(id=name) if name in _FUNCTIONS and names <= _KEYWORDS:
                known = _FUNCTIONS[name]
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if callable(_MATHS.get(name)):
                known = _MATHS[name]
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name), args=[], keywords=[]), attr=method) if (
                name not in _OUTSIDE
            ):
                pass  # Solution().solve(...)
            case _:
                raise _UnsupportedError

        def called(call: Call) -> Any:
            given = [argument(call) for argument in arguments]
            given_by_name = {keyword: value(call) for keyword, value in keywords.items()}
            if known is None:
                return call(name, method, given, given_by_name)
            return known(*given, **given_by_name)

        return called

    def _first_of(self, nodes: list[ast.expr], truth: bool) -> Value:
        """The first value with this truth value, else the last: ``or`` with true, ``and`` with false."""
        values = [self.value(node) for node in nodes]

        def first(call: Call) -> Any:
            found: Any = None
            for value in values:
                found = value(call)
                if bool(found) is truth:
                    break
            return found

        return first

    def _compared(self, left: ast.expr, ops: list[Callable[[Any, Any], Any]], others: list[ast.expr]) -> Value:
        values = [self.value(node) for node in (left, *others)]

        def compared(call: Call) -> bool:
            before = values[0](call)
            for op, value in zip(ops, values[1:], strict=True):
                after = value(call)
                if not op(before, after):
                    return False
                before = after
            return True

        return compared


def _known_comparison(op: ast.cmpop, right: ast.expr) -> bool:
    if isinstance(op, ast.Is | ast.IsNot):  # only with singletons, which are the same object in every process
        return isinstance(right, ast.Constant) and right.value in (None, True, False) and type(right.value) is not int
    return True
