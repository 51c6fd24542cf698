"""A reward that worker processes import, and nothing else with it: they start fast, and many of them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def obedient(samples: Sequence[Any]) -> list[float | None]:
    """Does what the texts say."""
    for sample in samples:
        word, _, rest = sample.text.partition(" ")
        if word == "die":
            os._exit(3)
        if word == "once" and not Path(rest).exists():
            Path(rest).touch()
            os._exit(4)
        if word == "raise":
            raise LookupError(f"no {rest}")
    return [None if sample.text == "none" else float(len(sample.text)) for sample in samples]
