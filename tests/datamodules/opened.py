"""DataModules after ``setup``."""

from collections.abc import Callable
from typing import Any

from tiny_models import tiny_tokenizer

Write = Callable[..., str]
"""The fixture ``write_rows``."""


def opened(kind: Callable[..., Any], data: Any, **options: Any) -> Any:
    """A DataModule of some data, with the tiny tokenizer unless told otherwise."""
    made = kind(data, **({"tokenizer": tiny_tokenizer()} | options))
    made.setup("fit")
    return made
