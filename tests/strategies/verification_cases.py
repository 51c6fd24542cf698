"""What one rank runs for the tests of verification on several ranks."""

import errno
from pathlib import Path

import torch

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.strategies.checkpoint.slow_steps import on_all_ranks
from rlhfkit.strategies.checkpoint.verification import find_intact
from strategies.parity_cases import RANK, RANKS


def find(folder: Path, place: str) -> dict[str, str]:
    """Which checkpoint is used, and the errors if there is none or a step fails on rank 1."""
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=RANKS)
    found, reasons = find_intact(Path(place) / "damaged.ckpt", timeout=60)
    answer = {"found": found.name, "reason": reasons[0]}

    def full() -> None:
        if RANK == 1:
            raise CheckpointError(OSError(errno.ENOSPC, "No space left on device"))

    for name, step in {
        "missing": lambda: find_intact(Path(place) / "missing.ckpt", timeout=60),
        "failed": lambda: on_all_ranks(full, timeout=60, doing="writing"),
    }.items():
        try:
            step()
        except CheckpointError as error:
            answer[name] = str(error).removeprefix("rank 1 failed: CheckpointError: ")
    return answer
