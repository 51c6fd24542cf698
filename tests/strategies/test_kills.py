"""A run that saves after every optimizer step and is killed at random and resumed many times equals the straight run.

Two steps an epoch, two micro-batches a step. ``RLHFKIT_KILLS=20`` kills each case twenty times; the suite kills three
cases three times.
"""

import functools
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed
KILLS = int(os.environ.get("RLHFKIT_KILLS", 3))
EPOCHS = 4 if KILLS <= 3 else 40
CASES = {
    "plain": ("rl", "auto", 1),
    "plain, 2 ranks": ("sft", "ddp", 2),  # a plain strategy saves rank 0 and cannot resume inside an iteration
    "ZeRO 2": ("rl", "rlhf_zero2", 1),
    "ZeRO 2, 2 ranks": ("rl", "rlhf_zero2", 2),
    "ZeRO 3": ("rl", "rlhf_zero3", 1),
    "ZeRO 3, 2 ranks": ("rl", "rlhf_zero3", 2),
    "ZeRO 2, background": ("rl", "background rlhf_zero2", 1),
    "ZeRO 3, background, 2 ranks": ("rl", "background rlhf_zero3", 2),
}


def trace(folder: Path, rank: int) -> tuple[int, list[list[int]]]:
    """The step that a life began at, and each micro-batch with the step it belongs to."""
    lines = (folder / f"trace_{rank}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.endswith("]")]
    return (entries[0][0], entries[1:]) if entries else (-1, [])


def newest(saved: Path) -> tuple[int, Path | None]:
    """The last complete checkpoint, by its step."""
    found = [(int(match[1]), path) for path in saved.glob("*.ckpt") if (match := re.match(r"step=(\d+)", path.name))]
    return max(found, default=(0, None))


def killed(function: str, count: int, folder: Path, delay: float, steps: int, **arguments: Any) -> None:
    """One life: killed a moment after so many more steps were saved."""
    saved = Path(arguments["saved"])
    before = newest(saved)[0]
    processes = ranks.start(function, count, folder, **arguments)
    try:
        deadline = time.monotonic() + 600
        while newest(saved)[0] < before + steps and all(process.poll() is None for process in processes):
            assert time.monotonic() < deadline, (folder / "rank_0.log").read_text()[-3000:]
            time.sleep(0.005)
        failed = [process.poll() for process in processes if process.poll() not in (None, 0)]
        assert not failed, (folder / "rank_0.log").read_text()[-5000:]
        time.sleep(delay)
    finally:
        ranks.stop(processes)


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Weights and folder of the run that nobody kills, which is the same whether or not it saves in the background."""

    @functools.cache
    def run(kind: str, strategy: str, count: int) -> tuple[Any, Path]:
        place, saving = tmp_path_factory.mktemp("straight"), {"saved": None, "resume": None}
        shared = {"kind": kind, "strategy": strategy, "place": str(place / "place"), "epochs": EPOCHS}
        return ranks.run("strategies.kill_cases:run", count, place / "run", **saving, **shared), place / "run"

    def of(case: str) -> tuple[Any, Path]:
        kind, strategy, count = CASES[case]
        return run(kind, strategy.removeprefix("background "), count)

    return of


FEW = [
    "plain",
    pytest.param("ZeRO 3, 2 ranks", marks=pytest.mark.smoke),
    "ZeRO 3, background, 2 ranks",
]


@pytest.mark.parametrize("case", FEW if KILLS <= 3 else CASES)
def test_a_run_killed_at_random_is_the_straight_one(
    straight_run: Callable[[str], tuple[Any, Path]], tmp_path: Path, case: str
) -> None:
    kind, strategy, count = CASES[case]
    function, chance, saved = "strategies.kill_cases:run", random.Random(case), tmp_path / "saved"
    shared: dict[str, Any] = {"kind": kind, "strategy": strategy, "place": str(tmp_path / "place"), "epochs": EPOCHS}
    straight, traced = straight_run(case)
    lives: list[Path] = []
    for life in range(KILLS):
        step, resume = newest(saved)
        if step == 2 * EPOCHS:
            break
        arguments = shared | {"saved": str(saved), "resume": resume and str(resume)}
        # The second step is its epoch's last, where Lightning miscounts.
        steps = min(chance.choice([1, 2, 2, 3]) if life else 2, 2 * EPOCHS - step)
        lives.append(tmp_path / f"life{life}")
        killed(function, count, lives[-1], chance.uniform(0.0, 0.4), steps, **arguments)
    lives.append(tmp_path / "last")
    resume = newest(saved)[1]
    last = ranks.run(function, count, lives[-1], saved=str(saved), resume=resume and str(resume), **shared)
    assert last == straight, "weights"
    assert newest(saved)[0] == 2 * EPOCHS
    for rank in range(count):
        begun = [trace(life, rank)[0] for life in lives]
        learned: list[list[int]] = []
        for start, life in zip(begun, lives, strict=True):
            if start >= 0:  # a life that ended before it began to train has undone nothing
                learned = [entry for entry in learned if entry[0] <= start] + trace(life, rank)[1]
        assert learned == trace(traced, rank)[1], f"micro-batches of rank {rank}, lives from {begun}"
    assert not [path.name for path in saved.iterdir() if path.name.endswith((".tmp", ".old"))]
