"""``LazyModule``: a module of others that takes long to import, and that not every process of the tests uses."""

import importlib
from typing import Any


class LazyModule:
    """Imports a module when something of it is first used: ``datasets = LazyModule("datasets")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # of pytest, which looks for tests and fixtures
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
