"""What is wrong in the words of ``rlhfkit fit`` is said before any library is loaded, in at most five lines.

The parser of LightningCLI knows everything and needs seconds to load what it knows from. This check reads source files
(:mod:`~rlhfkit.cli.signatures`): names of classes, functions and arguments, plain types, bounds of
numbers. What it cannot judge it passes on.
"""

import ast
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhfkit.argument_names import hint
from rlhfkit.cli.signatures import (
    UNKNOWN,
    Argument,
    Definition,
    Module,
    Signature,
    check_bounds,
    find,
    is_installed,
    method,
    names_of,
    signature,
)

TRAINER = "lightning.pytorch.trainer.trainer.Trainer"
_PACKAGES = (
    *("rlhfkit", "rlhfkit.rewards", "rlhfkit.modules", "rlhfkit.episodes", "rlhfkit.rollout"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.strategies"),
)
"""Where a class without a package is looked for."""
_DATA = {"train_dataloaders", "val_dataloaders", "dataloaders", "datamodule", "model"}
_PARTS = ("class_path", "init_args", "dict_kwargs")
_ASKING = ("-h", "--help", "--print_config")


class ConfigurationError(ValueError):
    """A configuration that cannot run; the message has at most five lines."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong in a configuration."""

    path: str
    value: Any
    rule: str
    hint: str = ""
    read: str = ""
    """Where to read more, as a command."""


def check_words(words: Sequence[str]) -> None:
    """Check the words after ``rlhfkit``, ``["fit", "--config", "run.yaml"]``.

    Raises:
        ConfigurationError: If a run of them cannot start.
    """
    command, *options = words
    if any(word.startswith(_ASKING) or ".help" in word.partition("=")[0] for word in options):
        return
    configuration = Configuration(options)
    problems = [*configuration.problems]
    if not problems:
        problems += Check(command).all(configuration.tree)
    if problems:
        raise ConfigurationError(message(problems, configuration))


def message(problems: Sequence[Problem], configuration: "Configuration") -> str:
    """The first problem and where the others are, in at most five lines."""
    first, *others = problems
    source = configuration.source(first.path)
    lines = [f"{first.path}" + ("" if first.value is None else f": {shortened(first.value)}") + source]
    lines.append(f"  {first.rule}" + (f": {first.hint}" if first.hint else ""))
    more = dict.fromkeys(one.path for one in others if one.path != first.path)
    if more:
        lines.append("  also wrong: " + shortened(", ".join(more), 100))
    if first.read:
        lines.append(f"  see: {first.read}")
    return "\n".join(lines)


def shortened(value: Any, width: int = 60) -> str:
    """A value as text in one line."""
    text = " ".join(str(value).split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Configuration:
    """The files and options of a command as one tree, later ones over earlier ones."""

    def __init__(self, options: Sequence[str]) -> None:
        self.tree: dict[str, Any] = {}
        self.files: list[str] = []
        self.problems: list[Problem] = []
        self._options: dict[str, str] = {}
        for name, value in self._pairs(options):
            if name in ("config", "c"):
                self._add_file(value)
            else:
                self._options[_plain_path(name)] = f" (--{name})"
                self._set(name.removesuffix("+").split("."), parsed(value), append=name.endswith("+"))

    def source(self, path: str) -> str:
        """Where a path was given, in brackets: an option, or a file."""
        option = self._options.get(_plain_path(path))
        return option or (f" ({self.files[-1]})" if self.files and path not in self.files else "")

    def _pairs(self, options: Sequence[str]) -> Iterator[tuple[str, str]]:
        words = list(options)
        while words:
            word = words.pop(0)
            name = word.lstrip("-")
            if not word.startswith("-") or not name:
                self.problems.append(Problem(word, None, "options begin with --, for example --config run.yaml"))
            elif "=" in name:
                name, _, value = name.partition("=")
                yield name, value
            elif words and (not words[0].startswith("--") or words[0] == "--"):
                yield name, words.pop(0)
            else:
                self.problems.append(Problem(word, None, "a value is missing after this option"))

    def _add_file(self, name: str) -> None:
        self.files.append(name)
        try:
            read = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            near = difflib.get_close_matches(Path(name).name, _siblings(name), n=1)
            guess = f"did you mean {Path(name).parent / near[0]}?" if near else ""
            self.problems.append(Problem(name, None, f"{error.strerror} (in {Path.cwd()})", guess))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            place = getattr(error, "problem_mark", None)
            line = f", line {place.line + 1}" if place else ""
            self.problems.append(Problem(name, None, f"no YAML{line}", str(getattr(error, "problem", error))))
        else:
            if read is None:
                return
            if not isinstance(read, dict):
                self.problems.append(Problem(name, read, "a configuration holds keys such as model, data and trainer"))
                return
            self.tree = _merged(self.tree, read)

    def _set(self, keys: Sequence[str], value: Any, *, append: bool) -> None:
        node: Any = self.tree
        for key in keys[:-1]:
            inner = _child(node, key)
            if isinstance(inner, str):
                inner = {"class_path": inner}
            elif not isinstance(inner, dict | list):
                inner = {}
            node = _with_child(node, key, inner)
        last = keys[-1]
        if append:
            listed = _child(node, last)
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            value = [*listed, *(value if isinstance(value, list) else [value])]
        else:
            value = _merged(_child(node, last), value)
        _with_child(node, last, value)


def _siblings(name: str) -> list[str]:
    """Files in the folder of a file."""
    folder = Path(name).parent
    return [one.name for one in folder.iterdir()] if folder.is_dir() else []


def _plain_path(path: str) -> str:
    """A path without what options may leave out: ``model.init_args.lr`` is ``model.lr``."""
    return ".".join(part for part in path.removesuffix("+").split(".") if part != "init_args" and not part.isdigit())


def parsed(text: str) -> Any:
    """The value of an option's text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _child(node: Any, key: str) -> Any:
    """What is below a key; options reach into the last item of a list, and into the arguments of a class."""
    if isinstance(node, list):
        node = node[-1] if node else None
    if isinstance(node, str):
        node = {"class_path": node}
    if not isinstance(node, dict):
        return None
    if key not in node and isinstance(node.get("init_args"), dict):
        return node["init_args"].get(key)
    return node.get(key)


def _with_child(node: Any, key: str, value: Any) -> Any:
    """Put a value below a key and return it."""
    if isinstance(node, list):
        if not node or not isinstance(node[-1], dict):
            node[-1:] = [{"class_path": node[-1]} if node else {}]
        node = node[-1]
    if "class_path" in node and key not in _PARTS:
        node = node.setdefault("init_args", {})
    if isinstance(node, dict):
        node[key] = value
    return value


def _merged(old: Any, new: Any) -> Any:
    """A value over another; a class in place of another keeps those of its arguments that it takes too."""
    if isinstance(old, dict) and "class_path" in old and isinstance(new, str):
        new = {"class_path": new}
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    if "class_path" in old and new.get("class_path", old["class_path"]) != old["class_path"]:
        known = signature(_locate(new["class_path"])).arguments
        old = {"init_args": {key: value for key, value in (old.get("init_args") or {}).items() if key in known}}
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


class Check:
    """Walks a configuration beside the signatures of what it names."""

    def __init__(self, command: str) -> None:
        trainer = find(TRAINER)
        self.command = "fit" if command == "estimate" else command
        self.trainer = signature(trainer)
        self.run = method(trainer, self.command) if isinstance(trainer, Definition) else Signature(complete=False)

    def all(self, tree: Mapping[str, Any]) -> Iterator[Problem]:
        """What is wrong in a configuration."""
        known = ["model", "data", "trainer", "seed_everything"]
        known += [name for name in self.run.arguments if name not in _DATA]
        if tree.get("model") is None:
            yield Problem("model", None, "is missing: the module to train, for example --model rlhfkit.GRPOModule")
        for key, value in tree.items():
            if key in known or (not self.run.complete and key not in ("config",)):
                continue
            guess = self._owner(key, tree) or hint(key, known)
            read = f"rlhfkit {self.command} --help"
            yield Problem(key, value, f"a configuration has {', '.join(known[:3])} and others, no {key}", guess, read)
        if isinstance(tree.get("trainer"), dict):
            read = f"rlhfkit {self.command} --help (trainer options)"
            yield from self._arguments("trainer", tree["trainer"], self.trainer, "Trainer", read)
        elif tree.get("trainer") is not None and not str(tree["trainer"]).endswith((".yaml", ".yml", ".json")):
            yield Problem("trainer", tree["trainer"], "holds the arguments of Lightning's Trainer")
        for key, base in (("model", "modules"), ("data", "datamodules")):
            if tree.get(key) is not None:
                yield from self._class(key, tree[key], base)

    def _owner(self, key: str, tree: Mapping[str, Any]) -> str:
        """Which part of the configuration takes an argument that was given at its top."""
        for part in ("model", "data"):
            node = _as_node(tree.get(part))
            found = _locate(node.get("class_path")) if node else None
            if isinstance(found, Definition) and key in signature(found).arguments:
                return f"did you mean {part}.init_args.{key}?"
        return f"did you mean trainer.{key}?" if key in self.trainer.arguments else ""

    def _class(self, path: str, value: Any, room: str) -> Iterator[Problem]:
        """A module or DataModule."""
        node = _as_node(value)
        if node is None:
            if not (isinstance(value, str) and value.endswith((".yaml", ".yml", ".json"))):
                yield Problem(path, value, "names a class by class_path, and its arguments by init_args")
            return
        if "class_path" not in node:
            yield Problem(f"{path}.class_path", None, "is missing: the class, for example rlhfkit.GRPOModule")
            return
        yield from self._described(path, node, names_of(f"rlhfkit.{room}"))

    def _described(self, path: str, node: Mapping[str, Any], names: Sequence[str] = ()) -> Iterator[Problem]:
        """A class by its path, and its arguments."""
        class_path = node["class_path"]
        found = _locate(class_path)
        if found is None or (found is UNKNOWN and names and "." not in str(class_path)):
            yield Problem(f"{path}.class_path", class_path, *_no_such(class_path, names))
            return
        if not isinstance(found, Definition) or "dict_kwargs" in node:
            return
        arguments = {key: value for key, value in node.items() if key not in _PARTS}
        if isinstance(node.get("init_args"), dict):
            arguments = node["init_args"] | arguments
        top = path.split(".")[0]
        read = f"rlhfkit {self.command} --{top}.help {class_path}" if path in ("model", "data") else ""
        full = class_path if "." in class_path else f"{found.module.name}.{found.node.name}"  # type: ignore[attr-defined]
        read = read or f"python -m pydoc {full}"
        yield from self._arguments(f"{path}.init_args", arguments, signature(found), found.node.name, read)  # type: ignore[attr-defined]

    def _object(self, path: str, value: Mapping[str, Any], found: Any) -> Iterator[Problem]:
        """The arguments of a class whose path the signature knows."""
        if "class_path" in value:
            yield from self._described(path, value)
        elif isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
            read = f"python -m pydoc {found.module.name}.{found.node.name}"
            given = value["init_args"] if isinstance(value.get("init_args"), dict) else value
            yield from self._arguments(path, given, signature(found), found.node.name, read)

    def _arguments(
        self, path: str, given: Mapping[str, Any], known: Signature, owner: str, read: str
    ) -> Iterator[Problem]:
        """Names, missing ones, and values."""
        for name, value in given.items():
            if name in known.arguments:
                yield from self._value(f"{path}.{name}", value, known.arguments[name], read)
                if name in known.checks and isinstance(number := _number(value), int | float):
                    try:
                        check_bounds(name, number, known.checks[name])
                    except (TypeError, ValueError) as error:
                        yield Problem(f"{path}.{name}", value, str(error), read=read)
            elif known.complete:
                rule = f"{owner} takes no argument {name}"
                yield Problem(f"{path}.{name}", value, rule, hint(str(name), known.arguments), read)
        for name, argument in known.arguments.items():
            if argument.required and name not in given:
                yield Problem(f"{path}.{name}", None, f"is missing: {owner} needs it", read=read)

    def _value(self, path: str, value: Any, argument: Argument, read: str) -> Iterator[Problem]:
        """A value beside its annotation."""
        kinds = [*_kinds(argument.annotation, argument.module)]
        if isinstance(value, list):
            for position, one in enumerate(value):
                if isinstance(one, dict) and "class_path" in one:
                    yield from self._described(f"{path}.{position}", one)
                elif isinstance(one, str) and str not in kinds and "." in one and _locate(one) is None:
                    yield Problem(f"{path}.{position}", one, *_no_such(one, ()))
        elif isinstance(value, dict):
            classes = [one for one in kinds if isinstance(one, Definition)]
            if "class_path" in value:
                yield from self._described(path, value)
            elif len(classes) == 1 and all(one is None or isinstance(one, Definition) for one in kinds):
                yield from self._object(path, value, classes[0])
        elif all(map(_is_object, kinds)) and "." in str(value) and _locate(value) is None:
            yield Problem(path, value, *_no_such(value, ()))
        if all(one is None or isinstance(one, type | Choice) for one in kinds) and not _fits(value, kinds):
            choices = [str(each) for one in kinds if isinstance(one, Choice) for each in one.values]
            near = difflib.get_close_matches(str(value), choices, n=1)
            guess = f"did you mean {near[0]}?" if near else ""
            yield Problem(path, "null" if value is None else value, f"must be {_in_words(kinds)}", guess, read)


def _is_object(kind: Any) -> bool:
    """Whether an annotation's part is given by the path of a class or function."""
    return kind is None or kind == "callable" or isinstance(kind, Definition)


def _in_words(kinds: Sequence[Any]) -> str:
    """What a value may be, as text."""
    words = [_WORDS[one] for one in kinds if one in (int, float, bool, str)]
    choices = dict.fromkeys(str(each) for one in kinds if isinstance(one, Choice) for each in one.values)
    words += [f"one of {', '.join(choices)}"] if choices else []
    return " or ".join([*words, *(["null"] if None in kinds else [])])


@dataclass(frozen=True)
class Choice:
    """The values of a ``Literal``."""

    values: tuple[Any, ...]


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PLAIN: Mapping[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "None": None}


def _kinds(annotation: ast.expr | None, module: Module, depth: int = 0) -> Iterator[Any]:
    """What an annotation allows: plain types, ``None``, a ``Choice``, classes, ``"callable"``, or ``UNKNOWN``."""
    if annotation is None or depth > 8:
        yield UNKNOWN
    elif isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            yield from _kinds(ast.parse(annotation.value, mode="eval").body, module, depth + 1)
        else:
            yield None if annotation.value is None else UNKNOWN
    elif isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        yield from _kinds(annotation.left, module, depth + 1)
        yield from _kinds(annotation.right, module, depth + 1)
    elif isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value).rpartition(".")[2]
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name == "Literal":
            yield Choice(tuple(one.value for one in inner if isinstance(one, ast.Constant)))
        elif name in ("Union", "Optional"):
            for one in inner:
                yield from _kinds(one, module, depth + 1)
            if name == "Optional":
                yield None
        else:
            yield "callable" if name == "Callable" else UNKNOWN
    elif isinstance(annotation, ast.Name) and annotation.id in _PLAIN and annotation.id not in module.names:
        yield _PLAIN[annotation.id]
    elif isinstance(annotation, ast.Name | ast.Attribute):
        found = module.resolve(annotation)
        if not isinstance(found, Definition):
            yield UNKNOWN
        elif isinstance(found.node, ast.Assign | ast.AnnAssign):
            yield from _kinds(found.node.value, found.module, depth + 1)
        else:
            yield found
    else:
        yield UNKNOWN


def _number(value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-6; anything else as it is."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                continue
    return value


def _fits(value: Any, kinds: Sequence[Any]) -> bool:
    """Whether a value is of one of the plain types."""
    if value is None or value == "null":
        return None in kinds
    if any(isinstance(one, Choice) and (value in one.values or str(value) in map(str, one.values)) for one in kinds):
        return True
    if isinstance(value, dict | list):
        return False
    if str in kinds or (isinstance(value, bool) and bool in kinds):
        return True
    if isinstance(value, str) and bool in kinds and value.lower() in ("true", "false"):
        return True
    number = _number(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return float in kinds or (
        int in kinds and (isinstance(number, int) or (math.isfinite(number) and number.is_integer()))
    )


def _as_node(value: Any) -> dict[str, Any] | None:
    """The description of a class: a mapping, or its path alone."""
    if isinstance(value, str) and not value.endswith((".yaml", ".yml", ".json")):
        return {"class_path": value}
    return value if isinstance(value, dict) else None


def _locate(class_path: Any) -> Definition | object | None:
    """The definition of a class or function by its path, or by its name alone if it is one of ours or Lightning's."""
    if not isinstance(class_path, str):
        return UNKNOWN
    if "." in class_path:
        return find(class_path)
    for package in _PACKAGES:
        found = find(f"{package}.{class_path}")
        if isinstance(found, Definition):
            return found
    return UNKNOWN


def _no_such(path: Any, names: Sequence[str]) -> tuple[str, str]:
    """Why there is nothing of this path, and the nearest that there is."""
    package, _, name = str(path).rpartition(".")
    if not package:
        near = difflib.get_close_matches(name, names, n=1)
        return "no class of rlhfkit has this name", f"did you mean rlhfkit.{near[0]}?" if near else ""
    if not is_installed(package.split(".")[0]):
        return f"there is no module {package.split('.')[0]}, neither installed nor in {Path.cwd()}", ""
    near = difflib.get_close_matches(name, names_of(package) or names, n=1)
    return f"{package} has no {name}", f"did you mean {package}.{near[0]}?" if near else ""
