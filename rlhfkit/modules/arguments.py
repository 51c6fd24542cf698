"""Arguments that have no effect beside others, or that a subclass does not take."""

import inspect
from collections.abc import Iterable, Mapping

import lightning as L


def drop_hyperparameters(names: Iterable[str], module: L.LightningModule, kind: type) -> None:
    """Drop hyperparameters that a module does not take, unless it has arguments of its own by these names.

    ``load_from_checkpoint`` hands all that are left to a class with ``**kwargs``. ``kind`` is the base class whose
    arguments they are.
    """
    own: set[str] = set()
    for below in type(module).__mro__[: type(module).__mro__.index(kind)]:
        if "__init__" in vars(below):  # mypy warns of __init__ of a class; that of exactly this class is meant
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
