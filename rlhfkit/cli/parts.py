"""``rlhfkit parts``: a list of the features that can be passed to modules and to the rollouts."""

import inspect
import re
from importlib import import_module
from pkgutil import iter_modules

from rlhfkit.parts import Part

ROOMS = {
    "For modules, parts=[...]:": "rlhfkit.modules.parts",
    "For RolloutCallback, parts=[...]:": "rlhfkit.callbacks.rollout.parts",
}
"""Where parts are, by where they are passed."""


def parts() -> None:
    """Print all parts: when they act in an iteration, what they read and write, and what they do."""
    for title, room in ROOMS.items():
        print(f"{title}\n")
        for kind in classes(room):
            print(f"  {kind.__module__}.{kind.__name__}")
            for line in facts(kind):
                print(f"      {line}")
        print()


def classes(room: str) -> list[type]:
    """The parts that the files of a room define, in order of file and line, without those that others derive from."""
    from rlhfkit.callbacks.rollout.part import RolloutPart

    found = []
    for file in iter_modules(import_module(room).__path__, f"{room}."):
        module = import_module(file.name)
        own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
        found += [kind for kind in own if issubclass(kind, Part | RolloutPart) and not kind.__name__.startswith("_")]
    return [kind for kind in found if not any(kind in other.__mro__[1:] for other in found)]


def facts(kind: type) -> list[str]:
    """What a line each says of a part."""
    found = [first_sentence(kind)]
    if issubclass(kind, Part):
        reads = ", ".join(kind.reads) or "nothing"
        writes = ", ".join(kind.writes) or "nothing"
        found.append(f"{kind.stage.name}; reads {reads}; writes {writes}")
    return found


def first_sentence(kind: type) -> str:
    """The first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text).replace("``", "")
    return re.split(r"\. (?=[A-Z])", text)[0].rstrip(".:") + "."
