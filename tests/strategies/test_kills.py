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
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import fit_run

from rlhfkit import RLHFDeepSpeedStrategy
from rlhfkit.rollout import ModuleWeights
from strategies import ranks
from strategies.parity_cases import RANK, RANKS

pytestmark = pytest.mark.distributed
KILLS = int(os.environ.get("RLHFKIT_KILLS", 3))
EPOCHS = 4 if KILLS <= 3 else 40
CASES = {
    "plain": ("auto", 1),
    "ZeRO 2": ("rlhf_zero2", 1),
    "ZeRO 2, 2 ranks": ("rlhf_zero2", 2),
    "ZeRO 3": ("rlhf_zero3", 1),
    "ZeRO 3, 2 ranks": ("rlhf_zero3", 2),
    "ZeRO 2, background": ("background rlhf_zero2", 1),
    "ZeRO 3, background, 2 ranks": ("background rlhf_zero3", 2),
}


class Trace(L.Callback):
    """Writes down which micro-batch every optimizer step learns from, as it happens, and the weights at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._write([trainer.global_step])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._write([trainer.global_step + 1, zlib.crc32(batch.input_ids.numpy().tobytes())])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [zlib.crc32(tensor.numpy().tobytes()) for _, tensor in ModuleWeights(pl_module.policy)]

    def _write(self, entry: list[int]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def live(folder: Path, strategy: str, place: str, saved: str | None = None, resume: str | None = None) -> list[int]:
    """One life of a run on a rank: until it is done, or killed.

    Args:
        folder: Of this launch: the trace.
        strategy: Name of the strategy; ``background rlhf_zero2`` saves in the background.
        place: Of the run: model and data.
        saved: Where to save after every optimizer step.
        resume: Checkpoint to go on from.

    Returns:
        A checksum of each weight at the end.
    """
    os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
    trace = Trace(folder / f"trace_{RANK}.jsonl")
    saver = [] if saved is None else [ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1)]
    stage, micro = strategy.removeprefix("background rlhf_zero"), {"micro_batch_size": 8 // RANKS}
    options: dict[str, Any] = {
        "strategy": strategy if stage == strategy else RLHFDeepSpeedStrategy(int(stage), async_save=True),
        "callbacks": [trace, *saver],
        "use_distributed_sampler": False,
        "max_epochs": EPOCHS,
        "enable_checkpointing": saved is not None,
        "accumulate_grad_batches": 2,
    }
    home = Path(place) / f"rank{RANK}"  # ranks must not write the same model
    fit_run(home, resume=resume, data_arguments=micro, devices=RANKS, **options)
    return trace.weights


def trace(folder: Path, rank: int) -> tuple[int, list[list[int]]]:
    """The step that a life began at, and each micro-batch with the step it belongs to."""
    lines = (folder / f"trace_{rank}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.endswith("]")]
    return (entries[0][0], entries[1:]) if entries else (-1, [])


def newest(saved: Path) -> tuple[int, Path | None]:
    """The last complete checkpoint, by its step."""
    found = [(int(match[1]), path) for path in saved.glob("*.ckpt") if (match := re.match(r"step=(\d+)", path.name))]
    return max(found, default=(0, None))


def killed(count: int, folder: Path, delay: float, steps: int, **arguments: Any) -> None:
    """One life: killed a moment after so many more steps were saved."""
    saved = Path(arguments["saved"])
    before = newest(saved)[0]
    processes = ranks.start(live, count, folder, **arguments)
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


StraightRun = Callable[[str, int], tuple[Any, list[list[list[int]]]]]


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> StraightRun:
    """Weights and traces of the run that nobody kills, which is the same whether or not it saves in the background."""

    @functools.cache
    def run(strategy: str, count: int) -> tuple[Any, list[list[list[int]]]]:
        place = tmp_path_factory.mktemp("straight")
        weights = ranks.run(live, count, place / "run", strategy=strategy, place=str(place / "place"))
        return weights, [trace(place / "run", rank)[1] for rank in range(count)]

    return run


FEW = [
    "plain",
    pytest.param("ZeRO 3, 2 ranks", marks=pytest.mark.smoke),
    "ZeRO 3, background, 2 ranks",
]


@pytest.mark.parametrize("case", FEW if KILLS <= 3 else CASES)
def test_a_run_killed_at_random_is_the_straight_one(straight_run: StraightRun, tmp_path: Path, case: str) -> None:
    strategy, count = CASES[case]
    chance, saved = random.Random(case), tmp_path / "saved"
    straight, learned_straight = straight_run(strategy.removeprefix("background "), count)
    lives: list[Path] = []

    def arguments() -> dict[str, Any]:
        """Of the next life, which begins where the last one has saved."""
        lives.append(tmp_path / f"life{len(lives)}")
        resume, place = newest(saved)[1], str(tmp_path / "place")
        shared = {"saved": str(saved), "resume": resume and str(resume), "place": place}
        return shared | {"strategy": strategy, "folder": lives[-1]}

    for life in range(KILLS):
        left = 2 * EPOCHS - newest(saved)[0]
        if not left:
            break
        # The second step is its epoch's last, where Lightning miscounts.
        steps = min(chance.choice([1, 2, 2, 3]) if life else 2, left)
        killed(count, delay=chance.uniform(0.0, 0.4), steps=steps, **arguments())
    assert ranks.run(live, count, **arguments()) == straight, "weights"
    assert newest(saved)[0] == 2 * EPOCHS
    for rank in range(count):
        begun = [trace(life, rank)[0] for life in lives]
        learned: list[list[int]] = []
        for start, life in zip(begun, lives, strict=True):
            if start >= 0:  # a life that ended before it began to train has undone nothing
                learned = [entry for entry in learned if entry[0] <= start] + trace(life, rank)[1]
        assert learned == learned_straight[rank], f"micro-batches of rank {rank}, lives from {begun}"
    assert not [path.name for path in saved.iterdir() if path.name.endswith((".tmp", ".old"))]
