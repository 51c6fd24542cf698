"""Processes that die or hang inside a broadcast: the others end within the time limit, and go on without them.

Covers ``waiting.py`` and ``rendezvous.py`` too. Over gloo; ``transfer_deaths.py`` has the processes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .transfer_deaths import LATE, PATIENT, TENSORS

SOON = PATIENT / 2
"""Seconds, on any machine: what is dead is not waited for."""
MOST = LATE + 60.0
"""Seconds, on any machine, until what is late was given up."""

Report = tuple[str, str, str, int, float]
"""Who, command, error, tensors received, seconds."""


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    script = Path(__file__).with_name("transfer_deaths.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return {scenario: [(who, what, *rest) for who, what, *rest in rows] for scenario, rows in found.items()}


def of(reports: list[Report], who: str, command: str) -> list[tuple[str, int, float]]:
    return [report[2:] for report in reports if report[:2] == (who, command)]


@pytest.mark.distributed
def test_a_worker_that_dies_is_noticed_at_once_by_the_trainer_and_soon_by_the_others(
    reports: dict[str, list[Report]],
) -> None:
    ((error, _, seconds),) = of(reports["worker dies"], "trainer", "update")
    assert error == "RuntimeError: worker 2 is dead"  # Ray tells it so, not gloo
    assert seconds < SOON
    (noticed, received, seconds), again = of(reports["worker dies"], "worker 1", "update")
    assert "has given up sending weights" in noticed
    assert received < TENSORS
    assert seconds < SOON
    assert again[:2] == ("", TENSORS)


@pytest.mark.distributed
def test_a_worker_that_hangs_is_given_up_after_the_time_limit(reports: dict[str, list[Report]]) -> None:
    ((error, _, seconds),) = of(reports["worker is suspended"], "trainer", "update")
    # The worker that still runs waits as long for the next block, and may be the first to say so.
    assert "late" in error or f"did not come from the trainer within {LATE:g} s" in error
    assert LATE <= seconds < MOST
    (_, received, seconds), again = of(reports["worker is suspended"], "worker 1", "update")
    assert received < TENSORS
    assert seconds < MOST
    assert again[:2] == ("", TENSORS)


@pytest.mark.distributed
@pytest.mark.parametrize("number", [1, 2])
def test_workers_notice_that_the_trainer_is_gone(reports: dict[str, list[Report]], number: int) -> None:
    ((error, received, seconds),) = of(reports["trainer dies"], f"worker {number}", "update")
    assert "the trainer at 127.0.0.1:" in error
    assert "is gone" in error
    assert received < TENSORS
    assert seconds < SOON


@pytest.mark.distributed
@pytest.mark.parametrize("number", [1, 2])
def test_workers_wait_for_a_trainer_that_hangs_no_longer_than_the_time_limit(
    reports: dict[str, list[Report]], number: int
) -> None:
    ((error, received, seconds),) = of(reports["trainer is suspended"], f"worker {number}", "update")
    assert f"did not come from the trainer within {LATE:g} s" in error
    assert received < TENSORS
    assert LATE <= seconds < MOST
