"""Arguments of classes and functions, read from their source files without importing them.

Importing Lightning takes seconds, reading the files that define a module and its bases milliseconds. Wherever a file
leaves something open (``import *``, a base that is computed, a compiled module), the answer is "not known".
"""

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rlhfkit.validation import check_integer, check_number

UNKNOWN = object()
"""In place of a definition that cannot be read."""
_CHECKS = {"check_number": check_number, "check_integer": check_integer}


@dataclass(frozen=True)
class Definition:
    """A statement that defines a name, in the module that it is written in."""

    module: "Module"
    node: ast.stmt


@dataclass
class Argument:
    """An argument of a class or function."""

    name: str
    annotation: ast.expr | None
    module: "Module"
    """Where the annotation's names are looked up."""
    required: bool


@dataclass
class Signature:
    """Arguments by name."""

    arguments: dict[str, Argument] = field(default_factory=dict)
    complete: bool = True
    """Whether there are no others."""
    checks: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Bounds of numbers by argument: a function of :mod:`rlhfkit.validation` and its keywords."""
    passes_on: bool = False
    """Whether other keywords go to the constructor of the next class."""
    decided: frozenset[str] = frozenset()
    """Arguments of the next constructor that this one gives itself."""


class Module:
    """The names that a source file defines or imports."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.is_package = path.name == "__init__.py"
        tree = ast.parse(path.read_bytes())
        self.names: dict[str, ast.stmt] = {}
        self.open = False
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                # "__getattr__" of rlhfkit's rooms gives what they import for type checkers
                self.open |= node.name == "__getattr__" and not name.startswith("rlhfkit")
                self.names[node.name] = node
            elif isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    self.open |= alias.name == "*"
                    self.names[alias.asname or alias.name.partition(".")[0]] = node
            elif isinstance(node, ast.Assign):
                self.names.update((target.id, node) for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.names[node.target.id] = node

    def find(self, name: str) -> "Definition | object | None":
        """The definition of a name of this module, ``UNKNOWN``, or ``None`` if the module has no such name."""
        node = self.names.get(name)
        if node is None:
            return UNKNOWN if self.open else None
        if isinstance(node, ast.ImportFrom):
            imported = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            source = _absolute(self, node)
            found = find(f"{source}.{imported}")
            return UNKNOWN if found is None else found  # a part of the library that this file imports itself
        if isinstance(node, ast.Import):
            return UNKNOWN
        return Definition(self, node)

    def resolve(self, expression: ast.expr) -> "Definition | object":
        """The definition that a name or a dotted name in this module's code stands for."""
        dotted = ast.unparse(expression)
        first, _, rest = dotted.partition(".")
        if not rest:
            found = self.find(first)
            return UNKNOWN if found is None else found
        node = self.names.get(first)
        if isinstance(node, ast.Import):
            source = next(alias.name for alias in node.names if first in (alias.asname, alias.name.partition(".")[0]))
            found = find(f"{source}.{rest}")
            return UNKNOWN if found is None else found
        return UNKNOWN


def find(dotted: str) -> Definition | object | None:
    """Return the definition of ``package.module.Name``; ``UNKNOWN``, or ``None`` if there is certainly no such name."""
    parts = dotted.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return UNKNOWN
    module: Module | object | None = _top_level(parts[0])
    for position, part in enumerate(parts[1:], 1):
        if not isinstance(module, Module):
            return module
        inner = _inside(module, part)
        if inner is None:
            found = module.find(part)
            return found if position == len(parts) - 1 or found is None else UNKNOWN
        module = inner
    return UNKNOWN  # a module


def signature(definition: Definition | object) -> Signature:
    """Return the arguments of a class, with those that ``**kwargs`` hands to its bases, or of a function."""
    if not isinstance(definition, Definition):
        return Signature(complete=False)
    if isinstance(definition.node, ast.ClassDef):
        return _of_class(definition)
    if isinstance(definition.node, ast.FunctionDef) and not definition.node.decorator_list:
        return _of_function(definition.node, definition.module, method=False)
    return Signature(complete=False)


def method(definition: Definition, name: str) -> Signature:
    """Return the arguments of a method that a class itself defines."""
    assert isinstance(definition.node, ast.ClassDef)
    node = next((one for one in definition.node.body if isinstance(one, ast.FunctionDef) and one.name == name), None)
    return Signature(complete=False) if node is None else _of_function(node, definition.module, method=True)


def names_of(package: str) -> list[str]:
    """Return the names of a module: those of ``__all__`` if it has that, otherwise what it defines."""
    module = _package(package)
    if module is None:
        return []
    node = module.names.get("__all__")
    return list(ast.literal_eval(node.value)) if isinstance(node, ast.Assign) else list(module.names)


def is_installed(module: str) -> bool:
    """Whether a module without a package can be imported."""
    return _top_level(module) is not None


def _package(name: str) -> Module | None:
    """The module of a dotted name of a package."""
    first, *rest = name.split(".")
    module = _top_level(first)
    for part in rest:
        module = _inside(module, part) if isinstance(module, Module) else None
    return module if isinstance(module, Module) else None


@cache
def _load(name: str, path: Path) -> Module | object:
    try:
        return Module(name, path)
    except (OSError, SyntaxError, ValueError):
        return UNKNOWN


def _top_level(name: str) -> Module | object | None:
    """A module or package on the path; ``None`` if there is none."""
    try:
        spec = importlib.util.find_spec(name) if name not in sys.modules else sys.modules[name].__spec__
    except (ImportError, ValueError):
        return UNKNOWN
    if spec is None:
        return None if name not in sys.modules else UNKNOWN
    if spec.origin is None or not spec.origin.endswith(".py"):
        return UNKNOWN  # a folder without __init__.py, or compiled
    return _load(name, Path(spec.origin))


def _inside(module: Module, name: str) -> Module | object | None:
    """A module inside a package; ``None`` if there is none."""
    if not module.is_package:
        return None
    spec = importlib.util.find_spec(module.name.partition(".")[0])
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.joinpath(*module.name.split(".")[1:])
    for path in (folder / name / "__init__.py", folder / f"{name}.py"):
        if path.is_file():
            return _load(f"{module.name}.{name}", path)
    compiled = any((folder / f"{name}{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return UNKNOWN if compiled or (folder / name).is_dir() else None


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """The module that ``from ... import`` names."""
    if not node.level:
        return str(node.module)
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those below ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *[one for each in node.handlers for one in each.body], *node.orelse])


def _of_class(definition: Definition) -> Signature:
    node, module = definition.node, definition.module
    assert isinstance(node, ast.ClassDef)
    if any(isinstance(one, ast.FunctionDef) and one.name == "__new__" for one in node.body) or node.keywords:
        return Signature(complete=False)
    constructor = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    dataclass_like = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
    if constructor is not None:
        decorated = [one for one in constructor.decorator_list if ast.unparse(one) != "_defaults_from_env_vars"]
        made = _of_function(constructor, module, method=True)
        made.complete &= not decorated
        return _with_bases(made, definition) if made.passes_on else made
    made = Signature()
    if dataclass_like:
        made.arguments = {one.name: one for one in _fields(node, module)}
    return _with_bases(made, definition, first_constructor=not dataclass_like)


def _with_bases(made: Signature, definition: Definition, *, first_constructor: bool = False) -> Signature:
    """Add the arguments of the bases; of the first that has any, if the class has no constructor itself."""
    assert isinstance(definition.node, ast.ClassDef)
    for base in definition.node.bases:
        found = definition.module.resolve(base.value if isinstance(base, ast.Subscript) else base)
        if not isinstance(found, Definition):
            name = ast.unparse(base).split("[")[0].rpartition(".")[2]
            if name in ("Generic", "Protocol", "ABC", "object"):
                continue
            if name == "NamedTuple":
                made.arguments |= {one.name: one for one in _fields(definition.node, definition.module)}
                continue
            made.complete = False
            continue
        inherited = signature(found)
        arguments = {name: one for name, one in inherited.arguments.items() if name not in made.decided}
        made.arguments = arguments | made.arguments
        made.checks = inherited.checks | made.checks
        made.complete &= inherited.complete
        if first_constructor and inherited.arguments and not inherited.passes_on:
            break
    return made


def _fields(node: ast.ClassDef, module: Module) -> Iterator[Argument]:
    """The fields of a dataclass that its constructor takes."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            if "ClassVar" in ast.unparse(one.annotation) or (one.value and "init=False" in ast.unparse(one.value)):
                continue
            yield Argument(one.target.id, one.annotation, module, required=one.value is None)


def _of_function(node: ast.FunctionDef, module: Module, *, method: bool) -> Signature:
    """The arguments of a function, less ``self`` of a method."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(positional, defaults, strict=True)][method:]
    pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
    made = Signature({one.arg: Argument(one.arg, one.annotation, module, default is None) for one, default in pairs})
    made.checks = dict(_bounds(node))
    if given.kwarg is None or given.kwarg.arg == "unknown":  # of our bases, which refuse what it holds
        return made
    calls = [call for call in _super_calls(node) if f"**{given.kwarg.arg}" in ast.unparse(call)]
    made.complete = made.passes_on = method and len(calls) == 1
    if made.passes_on:
        made.decided = frozenset(word.arg for word in calls[0].keywords if word.arg) - set(made.arguments)
    return made


def _super_calls(node: ast.FunctionDef) -> Iterator[ast.Call]:
    """Calls of the next class's constructor."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "super().__init__":
            yield one


def _bounds(node: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Calls such as ``check_number("gamma", gamma, minimum=0)`` at the top of a constructor."""
    for one in node.body:
        call = one.value if isinstance(one, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _CHECKS:
            try:
                name, keywords = (
                    ast.literal_eval(call.args[0]),
                    {w.arg: ast.literal_eval(w.value) for w in call.keywords},
                )
            except ValueError:
                continue
            if len(call.args) == 2 and isinstance(call.args[1], ast.Name) and call.args[1].id == name:
                yield name, (call.func.id, {str(key): value for key, value in keywords.items()})


def check_bounds(name: str, value: object, check: tuple[str, Mapping[str, Any]]) -> None:
    """Apply a check of :attr:`Signature.checks`.

    Raises:
        ValueError: If the number is out of bounds.
        TypeError: If it is no number.
    """
    _CHECKS[check[0]](name, value, **check[1])
