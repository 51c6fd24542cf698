"""Messages between ranks and waiting without collectives: one process, three over TCP."""

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from strategies import ranks

import rlhfkit.rank_store
from rlhfkit.distributed import RecoverableError, gather_objects
from rlhfkit.rank_store import LocalStore, RankError, rank_store


def test_in_one_process_entries_stay_in_memory_and_are_read_once() -> None:
    log = rank_store().log("log")
    log.append("a")
    log.append("b")
    assert log.read() == [(0, "a"), (0, "b")]
    assert log.read() == []
    assert log.run(lambda: 3, timeout=1, waiting_for="nothing") == 3
    with pytest.raises(ZeroDivisionError):
        log.run(lambda: 1 // 0, timeout=1, waiting_for="nothing")
    store = LocalStore()
    logs = [store.log("a") for _ in range(3)]  # each time a new one
    for log in logs:
        log.append(log.name)
    assert [log.read()[0][1] for log in logs] == ["a/0", "a/1", "a/2"]


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


def everything(folder: Path) -> None:
    """What needs no rank to die."""
    rank, world_size = start()
    rlhfkit.rank_store._GRACE_SECONDS = 120.0  # for ranks that are late because the machine is busy
    store = rank_store()
    assert rank_store() is store

    def exchange() -> list[Any]:
        for number in range(50):
            log.append((rank, number))
        entries: list[Any] = []
        while len(entries) < 50 * world_size:
            entries += log.read(1.0)
        return entries

    log = store.log("exchange")
    found = log.run(exchange, timeout=240, waiting_for="entries")
    assert sorted(found) == [(rank, (rank, n)) for rank in range(3) for n in range(50)]
    assert gather_objects(found) == [found] * 3, "all read them in one order"
    for _ in range(2):
        store.log("exchange")
    dist.barrier()
    assert store.entries("exchange/0", 0) == [], "a log is forgotten"
    if rank == 0:
        store._store.add("log/forged/count", 1)
        store._store.set("log/forged/0", pickle.dumps("anything"))
    dist.barrier()
    with pytest.raises(RankError, match="has an entry that no rank"):  # and is not unpickled
        store.entries("forged", 0)
    slow = store.log("slow")
    assert slow.run(lambda: time.sleep(2 * rank) or rank, timeout=240, waiting_for="a slow rank") == rank

    def fail(error: Exception) -> None:
        if rank == 1:
            raise error
        for _ in range(120):
            log.read(1.0)

    for error, elsewhere in ((ValueError("a bug"), "RuntimeError"), (EnginesDied("gone"), "EnginesDied")):
        log = store.log(type(error).__name__)
        text, seconds = raised(lambda: log.run(lambda: fail(error), timeout=240, waiting_for="a step"))  # noqa: B023
        own = f"{type(error).__name__}: {error}"
        assert text == (own if rank == 1 else f"{elsewhere}: rank 1 failed: {own}"), text
        assert seconds < 60, "the others would go on for 120"
    late, hang = store.log("late"), 600.0 if rank == 1 else 0.0
    text, seconds = raised(
        lambda: late.run(lambda: late.call(lambda: time.sleep(hang)), timeout=1.5, waiting_for="scoring")
    )
    own = "TimeoutError: scoring took longer than 1.5 s on rank 1"
    assert text == (own if rank == 1 else f"RuntimeError: rank 1 failed: {own}"), text
    assert seconds < 60, "it hangs for 600"
    dist.barrier()  # rank 0 ends last


@pytest.mark.distributed
def test_three_ranks_read_all_entries_in_one_order_and_wait_for_one_another_until_one_fails(tmp_path: Path) -> None:
    ranks.run(everything, 3, tmp_path)


def one_dies(folder: Path) -> None:
    """Rank 1 ends without a word while the others wait for it."""
    rank, _ = start()
    rlhfkit.rank_store.DEAD_AFTER_SECONDS = 6.0
    log = rank_store().log("die")
    if rank == 1:
        os._exit(0)
    text, seconds = raised(lambda: log.run(lambda: None, timeout=240, waiting_for="samples"))
    assert "rank 1 has given no sign of life for" in text, text
    assert "waited for it (samples)" in text, text
    assert seconds < 60, "they would wait for 240"


@pytest.mark.distributed
def test_a_dead_rank_is_named_within_seconds(tmp_path: Path) -> None:
    found = ranks.run_until_dead(one_dies, 3, tmp_path)
    assert sorted(found) == [0, 2], [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 2)]
