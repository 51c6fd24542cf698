"""No program gets a reward that it has not earned, or another's: each attempt is a program of ``reward_hacks.py``.

Covers ``driver.py``, ``worker.py`` and ``judge.py``, as attacked by the programs that they run.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.programs.reward_hacks import (
    ASSERTIONS,
    CHANGED_INTERPRETER,
    ENDLESS_JUDGING,
    FORGERIES,
    HONEST,
    HONEST_OUTPUT,
    OUTPUTS,
    PRINTING,
    SEARCHES,
    SECRETS,
)
from rewards.samples import sampled
from rlhfkit.data import Sample
from rlhfkit.rewards import CodeExecution

CALLED = {**CHANGED_INTERPRETER, **SEARCHES, **FORGERIES}


def sample(program: str, tests: object) -> Sample:
    return sampled(f"```python\n{program}\n```", prompt=4, tests=tests)


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeExecution]:
    made = CodeExecution(timeout=60.0, workers=2)  # none of them needs it, but for a crowded machine
    yield made
    made.close()


@pytest.fixture(scope="module")
def rewards(reward: CodeExecution) -> dict[str, tuple[object, object, object]]:
    """Of each hack, between an honest program before it and one behind it, with the data set for all to read."""
    data = Path("/var/tmp/rlhfkit-hacks.jsonl")
    data.write_text(str(SECRETS))
    data.chmod(0o644)
    hacks = [(name, program, ASSERTIONS, HONEST) for name, program in CALLED.items()]
    hacks += [(f"{name}, printing", program, OUTPUTS, HONEST_OUTPUT) for name, program in PRINTING.items()]
    batch = [sample(program, tests) for _, hack, tests, honest in hacks for program in (honest, hack)]
    try:
        given = reward([*batch, sample(HONEST, ASSERTIONS)])
    finally:
        data.unlink()
    return {name: (given[2 * i], given[2 * i + 1], given[2 * i + 2]) for i, (name, *_) in enumerate(hacks)}


@pytest.mark.parametrize("name", [*CALLED, *(f"{name}, printing" for name in PRINTING)])
def test_a_hack_gets_nothing_and_harms_nobody(rewards: dict[str, tuple[object, object, object]], name: str) -> None:
    assert rewards[name] == (1.0, 0.0, 1.0)


@pytest.mark.long
def test_the_time_limit_covers_judging() -> None:
    """Each takes half a minute or more in the interpreter that judges, and cannot be interrupted there."""
    quick = CodeExecution(timeout=2.0, workers=2)
    batch = [sample(program, [test, test]) for program, test in ENDLESS_JUDGING.values()]
    started = time.monotonic()
    assert quick(batch) == [0.0] * len(batch)
    assert time.monotonic() - started < 60
    assert quick.metrics()["code_execution/timeout_fraction"] == 1.0
    quick.timeout = 60.0
    assert quick([sample(HONEST, ASSERTIONS)]) == [1.0]
    quick.close()
