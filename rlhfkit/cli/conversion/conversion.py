"""``Conversion``: the options of another library's configuration that are left, and what the others became."""

from collections.abc import Mapping
from typing import Any

Configuration = dict[str, Any]
"""What ``rlhfkit fit --config`` reads."""


class Conversion:
    """Takes options one by one; what nobody takes has no counterpart.

    An option that is left out of the configuration counts with its default, so that the result does not depend on
    defaults being the same in both libraries.

    Attributes:
        model: Arguments of the module.
        data: Arguments of the DataModule.
        trainer: Arguments of the Trainer.
        callbacks: Callbacks, each with ``class_path`` and ``init_args``.
        differences: What the result would do otherwise; the conversion is exact if there is none.
        notes: What was left out without an effect on what is learned.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._left = dict(options)
        self.given = frozenset(options)
        self.model: Configuration = {}
        self.data: Configuration = {}
        self.trainer: Configuration = {}
        self.callbacks: list[Configuration] = []
        self.differences: list[str] = []
        self.notes: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or its default in the other library; it is then dealt with."""
        value = self._left.pop(name, default)
        return default if value is None else value

    def take_steps(self, name: str, default: int) -> int:
        """Take a number of steps; a share of the run is a difference, and becomes the default."""
        value = self.take(name, default)
        if value != int(value):
            self.differ(f"{name}={value!r}", "a share of the run; give the number of steps")
            return default
        return int(value)

    def differ(self, name: str, why: str) -> None:
        """Say that an option cannot be converted exactly."""
        self.differences.append(f"{name}: {why}")

    def refuse(self, reasons: Mapping[str, str], *, unless: Mapping[str, Any]) -> None:
        """Take options without a counterpart; each one with another value than in ``unless`` is a difference."""
        for name, why in reasons.items():
            value = self.take(name, unless.get(name))
            if value != unless.get(name):
                self.differ(f"{name}={value!r}", why)

    def ignore(self, names: frozenset[str]) -> None:
        """Take options that do not change what is learned, with a note if they were given."""
        found = sorted(names & self._left.keys())
        for name in found:
            del self._left[name]
        if found:
            self.notes.append(f"left out, as they do not change what is learned: {', '.join(found)}")

    def finish(self) -> None:
        """Make a difference of each option that nobody has taken."""
        for name, value in self._left.items():
            self.differ(f"{name}={value!r}", "unknown here; docs/coming_from.md has a row for every option")
        self._left = {}

    def callback(self, class_path: str, **arguments: Any) -> None:
        """Add a callback."""
        self.callbacks.append({"class_path": class_path, **({"init_args": arguments} if arguments else {})})
