"""How tests wait: for an event, never for a guess of seconds. A limit is for what never comes, on any machine."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LIMIT = 120.0
"""Seconds."""


def until(condition: Callable[[], T], *, limit: float = LIMIT, report: Callable[[], object] = str) -> T:
    """Wait for something true and return it; ``report`` says what there is instead after ``limit`` seconds."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, f"waited for {limit:g} s. {report()}"
        time.sleep(0.01)
    return found


def has_ended(pid: int) -> bool:
    """Whether a process is gone; one that nobody collects has ended too."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
