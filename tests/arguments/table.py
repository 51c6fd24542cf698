"""What a table of arguments is made of: changes that must be seen, and reasons why one cannot be."""

import inspect
import tempfile
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L


@dataclass(frozen=True)
class Change:
    """Another value of an argument, after which something that a user can observe is different."""

    value: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that both runs have, because the one in question says something about them."""
    around: Mapping[str, Any] = field(default_factory=dict)
    """What both runs have around the object: data, callbacks."""
    built: bool = False
    """Seen on the object as it is built; nothing has to run."""
    refused: bool = False
    """What is seen is an error that says why it does not fit here."""


@dataclass(frozen=True)
class Unseen:
    """An argument that changes nothing that can be observed here."""

    reason: str


PLACES = ("rlhfkit.modules", "rlhfkit.models.load", "rlhfkit.serving")
"""Where dataclasses of options are."""

Rows = Mapping[str, Change | Unseen]
Observe = Callable[[type, Mapping[str, Any], Mapping[str, Any], bool], Any]
"""From a class, its arguments, what is around it and whether it only has to be built, to whatever can be compared."""


def arguments_of(kind: type) -> dict[str, inspect.Parameter]:
    """All arguments of a class by name: its own, and those that its ``**kwargs`` hand on along the MRO.

    In place of an options dataclass of ``PLACES`` stand its fields, as ``argument.field``.
    """
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in base.__dict__:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                found.setdefault(parameter.name, parameter)
        if not any(one.kind == one.VAR_KEYWORD for one in parameters):
            break
    for name, parameter in list(found.items()):
        members = typing.get_args(parameter.annotation) or (parameter.annotation,)
        options = [one for one in members if is_dataclass(one) and one.__module__.startswith(PLACES)]
        if options:
            found |= {f"{name}.{one.name}": parameter for one in fields(options[0])}
            del found[name]
    return found


def observed(folder: Path, arguments: Mapping[str, Any], run: Callable[[Path, dict[str, Any]], Any]) -> Any:
    """What a function shows with arguments and a folder of its own, or the error.

    ``@name`` stands for what is in ``folder`` or, if nothing is there, may be written into the other one.
    """
    with tempfile.TemporaryDirectory() as own:

        def path(value: Any) -> Any:
            if isinstance(value, partial):
                return value.func(*map(path, value.args))
            if isinstance(value, list | tuple):
                return type(value)(map(path, value))
            if not (isinstance(value, str) and value.startswith("@")):
                return value
            return str((folder if (folder / value[1:]).exists() else Path(own)) / value[1:])

        try:
            return run(Path(own), {name: path(value) for name, value in arguments.items()})
        except (ValueError, TypeError, RuntimeError) as error:
            return {"error": str(error).replace(own, "")}


def quiet_trainer(folder: Path, **options: Any) -> L.Trainer:
    """On one CPU, for one epoch; it writes nothing of its own."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    usual = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return L.Trainer(**{**quiet, **usual, "default_root_dir": str(folder), **options})


def check_none_is_ignored(
    kind: type, rows: Rows, least: Mapping[str, Any], observe: Observe, *, names: Iterable[str] = (), first: Any = None
) -> None:
    """Fails if an argument of a class makes no difference, or an error where none was expected.

    Args:
        kind: The class.
        rows: Its table.
        least: Arguments that every run has.
        observe: Runs it.
        names: The arguments, if not all.
        first: What ``observe`` has shown of the class with ``least``; ``None``: not observed yet.
    """
    seen: dict[str, Any] = {} if first is None else {_key(least, {}, False): first}
    found = []
    for name in names or rows:
        row = rows[name]
        if isinstance(row, Unseen):
            continue
        given = {**least, **row.given}
        key = _key(given, row.around, row.built)
        if key not in seen:
            seen[key] = observe(kind, given, row.around, row.built)
        changed = observe(kind, {**given, name: row.value}, row.around, row.built)
        errors = [one["error"] for one in (seen[key], changed) if isinstance(one, dict) and "error" in one]
        if len(errors) != row.refused:
            found.append(f"{name}: {errors}")
        elif changed == seen[key]:
            found.append(name)
    assert not found, "\n".join(found)


def seen_twice(kind: type, least: Mapping[str, Any], observe: Observe) -> Any:
    """What ``observe`` shows of the class, which is the same each time, so that a difference is one."""
    first, again = (observe(kind, least, {}, False) for _ in range(2))
    assert first == again
    assert not isinstance(first, dict) or "error" not in first
    return first


def _key(given: Mapping[str, Any], around: Mapping[str, Any], built: bool) -> str:
    """What a run is found again by."""
    return repr((sorted(given.items(), key=str), sorted(around.items(), key=str), built))
