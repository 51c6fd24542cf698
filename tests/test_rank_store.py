"""Messages between ranks and waiting without collectives: one process, three over TCP."""

from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run("rank_store_ranks:everything", ranks=3, folder=tmp_path_factory.mktemp("three"))


@pytest.mark.distributed
class TestThreeRanks:
    """One launch for all checks."""

    def test_all_read_all_entries_in_one_order(self, three: list[dict[str, Any]]) -> None:
        first = three[0]["entries"]
        assert sorted(map(str, first)) == sorted(str([rank, [rank, n]]) for rank in range(3) for n in range(50))
        assert all(rank["entries"] == first for rank in three)

    def test_a_forgotten_log_is_empty(self, three: list[dict[str, Any]]) -> None:
        assert all(rank["forgotten"] == [] for rank in three)

    def test_entries_that_no_rank_has_signed_are_not_unpickled(self, three: list[dict[str, Any]]) -> None:
        for rank in three:
            assert rank["forged"].startswith("RankError: the store that ranks wait on has an entry that no rank")

    def test_ranks_wait_for_a_slow_one(self, three: list[dict[str, Any]]) -> None:
        assert [rank["slow"] for rank in three] == [0, 1, 2]

    def test_an_error_ends_the_step_of_all_at_once_and_names_the_rank(self, three: list[dict[str, Any]]) -> None:
        messages = [rank["failed"][0] for rank in three]
        assert messages == [
            "RuntimeError: rank 1 failed: ValueError: a bug",
            "ValueError: a bug",
            "RuntimeError: rank 1 failed: ValueError: a bug",
        ]
        assert max(rank["failed"][1] for rank in three) < 60  # the others would go on for 120

    def test_a_recoverable_error_keeps_its_type_unless_another_rank_failed(self, three: list[dict[str, Any]]) -> None:
        assert [rank["recoverable"][0] for rank in three] == [
            "EnginesDied: rank 1 failed: EnginesDied: gone",
            "EnginesDied: gone",
            "EnginesDied: rank 1 failed: EnginesDied: gone",
        ]
        assert three[0]["both"][0] == "RuntimeError: rank 1 failed: ValueError: a bug"

    def test_a_late_rank_is_named(self, three: list[dict[str, Any]]) -> None:
        own = "TimeoutError: scoring took longer than 1.5 s on rank 1"
        told = f"RuntimeError: rank 1 failed: {own}"
        assert [rank["late"][0] for rank in three] == [told, own, told]
        assert max(rank["late"][1] for rank in three) < 60  # it hangs for 600


@pytest.mark.distributed
def test_a_dead_rank_is_named_within_seconds(tmp_path: Path) -> None:
    found = ranks.run_until_dead("rank_store_ranks:one_dies", ranks=3, folder=tmp_path)
    for rank in (0, 2):
        text, seconds = found[rank]["death"]
        assert "rank 1 has given no sign of life for" in text
        assert "waited for it (samples)" in text
        assert seconds < 60  # they would wait for 240
