"""Arguments that have no effect beside others, or that a subclass does not take."""

import inspect
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import lightning as L

from rlhfkit.validation import resolve_function


def take_out(names: Iterable[str], given: MutableMapping[str, Any], kind: type) -> list[str]:
    """Take arguments that a class does not have out of those given to it; return those that would change something.

    They are arguments of a base class, ``kind``. A configuration file gives all of these, with the defaults of ``kind``
    and functions by their names, which is not what a user has chosen.

    Returns:
        ``name=value`` of each that is not the default.
    """
    defaults: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base):  # mypy warns of __init__ of a class; that of exactly this class is meant
            defaults |= {one.name: one.default for one in inspect.signature(base.__init__).parameters.values()}  # type: ignore[misc]
    changed = []
    for name in sorted({*names} & {*given}):
        value, default = given.pop(name), defaults[name]
        by_name = isinstance(value, str) and callable(default)
        if (resolve_function(value, name, home="rlhfkit.losses") if by_name else value) != default:
            changed.append(f"{name}={value!r}")
    return changed


def drop_hyperparameters(names: Iterable[str], module: L.LightningModule, kind: type) -> None:
    """Drop hyperparameters that a module does not take, unless it has arguments of its own by these names.

    ``load_from_checkpoint`` hands all that are left to a class with ``**kwargs``. ``kind`` is the base class whose
    arguments they are.
    """
    own: set[str] = set()
    for below in type(module).__mro__[: type(module).__mro__.index(kind)]:
        if "__init__" in vars(below):  # mypy: as above
            own |= inspect.signature(below.__init__).parameters.keys()  # type: ignore[misc]
    for name in {*names} - own:
        module.hparams.pop(name, None)


def refuse_without_effect(given: Mapping[str, bool], beside: str) -> None:
    """Raise ValueError if arguments were given that have no effect because of another one.

    ``given`` says by name whether each was given; ``beside`` is the other argument, as the user wrote it.
    """
    names = [name for name, chosen in given.items() if chosen]
    if names:
        raise ValueError(f"{', '.join(names)} would have no effect beside {beside}: leave out the one or the other")
