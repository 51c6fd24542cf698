"""What ranks do with ``rlhfkit.rank_store``; each rank is a process (``strategies/ranks.py``)."""

import os
import pickle
import time
from typing import Any

import torch.distributed as dist

import rlhfkit.rank_store
from rlhfkit.distributed import RecoverableError
from rlhfkit.rank_store import rank_store


class EnginesDied(RecoverableError):
    """What all ranks can recover from."""


def start() -> tuple[int, int]:
    """Join the other ranks."""
    rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank, world_size


def raised(function: Any) -> tuple[str, float]:
    """Type and text of what a call raises, and the seconds it took."""
    begin = time.monotonic()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "", time.monotonic() - begin


def everything(**_: Any) -> dict[str, Any]:
    """What needs no rank to die."""
    rank, world_size = start()
    rlhfkit.rank_store._GRACE_SECONDS = 120.0  # for ranks that are late because the machine is busy
    store = rank_store()
    found: dict[str, Any] = {"same": rank_store() is store}

    def exchange() -> list[Any]:
        for number in range(50):
            log.append((rank, number))
        entries: list[Any] = []
        while len(entries) < 50 * world_size:
            entries += log.read(1.0)
        return entries

    log = store.log("exchange")
    found["entries"] = log.run(exchange, timeout=240, waiting_for="entries")
    dist.barrier()
    for _ in range(2):
        store.log("exchange")
    dist.barrier()
    found["forgotten"] = store.entries("exchange/0", 0)
    if rank == 0:
        store._store.add("log/forged/count", 1)
        store._store.set("log/forged/0", pickle.dumps("anything"))
    dist.barrier()
    found["forged"] = raised(lambda: store.entries("forged", 0))[0]
    slow = store.log("slow")
    found["slow"] = slow.run(lambda: time.sleep(2 * rank) or rank, timeout=240, waiting_for="a slow rank")

    def failing(error: Exception | None, other: Exception | None = None) -> tuple[str, float]:
        def step() -> None:
            if rank == 1 and error is not None:
                raise error
            if other is not None:
                raise other
            for _ in range(120):
                log.read(1.0)

        return raised(lambda: log.run(step, timeout=240, waiting_for="a step"))

    for name, arguments in {
        "failed": (ValueError("a bug"),),
        "recoverable": (EnginesDied("gone"),),
        "both": (ValueError("a bug"), EnginesDied("gone")),
    }.items():
        log = store.log(name)
        found[name] = failing(*arguments)
    late = store.log("late")
    hang = 600.0 if rank == 1 else 0.0
    found["late"] = raised(
        lambda: late.run(lambda: late.call(lambda: time.sleep(hang)), timeout=1.5, waiting_for="scoring")
    )
    dist.barrier()  # rank 0 ends last
    return found


def one_dies(**_: Any) -> dict[str, Any]:
    """Rank 1 ends without a word while the others wait for it."""
    rank, _ = start()
    rlhfkit.rank_store.DEAD_AFTER_SECONDS = 6.0
    store = rank_store()
    log = store.log("die")
    if rank == 1:
        os._exit(0)
    return {"death": raised(lambda: log.run(lambda: None, timeout=240, waiting_for="samples"))}
