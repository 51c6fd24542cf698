"""Messages between ranks and waiting without collectives: one process, three over TCP."""

from pathlib import Path

import pytest
from strategies import ranks

from rlhfkit.rank_store import LocalStore, rank_store


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


@pytest.mark.distributed
def test_three_ranks_read_all_entries_in_one_order_and_wait_for_one_another_until_one_fails(tmp_path: Path) -> None:
    first, *others = ranks.run("rank_store_ranks:everything", ranks=3, folder=tmp_path)
    assert sorted(map(str, first)) == sorted(str([rank, [rank, n]]) for rank in range(3) for n in range(50))
    assert others == [first] * 2


@pytest.mark.distributed
def test_a_dead_rank_is_named_within_seconds(tmp_path: Path) -> None:
    found = ranks.run_until_dead("rank_store_ranks:one_dies", ranks=3, folder=tmp_path)
    assert sorted(found) == [0, 2], [(tmp_path / f"rank_{rank}.log").read_text() for rank in (0, 2)]
