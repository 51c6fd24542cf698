"""Ranks that ask one engine, and ranks that die while it works for them: real ranks and Ray, without a model."""

from pathlib import Path

import pytest
from strategies import ranks
from waiting import until

from rollout.remote.sleeping_engines import merged, phases_of_a_run

pytestmark = [pytest.mark.distributed, pytest.mark.ray]


def test_every_rank_frees_memory_before_an_engine_takes_it(tmp_path: Path) -> None:
    """Two ranks and one engine, on the first one's device: the other exports nothing, and frees its own memory."""
    first, second = ranks.run("rollout.remote.sleeping_engines:on_ranks", 2, tmp_path)
    assert first["digest"] == second["digest"]
    assert (first["exported"], second["exported"]) == (5, 0)
    for rank in (first, second):
        seen = merged(rank["log"], first["engine"])
        assert seen[-len(phases_of_a_run(2)) :] == phases_of_a_run(2)


@pytest.mark.parametrize(
    ("scenario", "num_ranks", "survivor"), [("an_engine_and_a_rank_die", 4, 0), ("rank_0_dies", 2, 1)]
)
def test_a_rank_that_dies_is_noticed_by_the_one_that_survives(
    tmp_path: Path, scenario: str, num_ranks: int, survivor: int
) -> None:
    processes = ranks.start(f"rollout.remote.pool_ranks:{scenario}", ranks=num_ranks, folder=tmp_path)
    try:
        until(lambda: processes[survivor].poll() is not None, limit=600)
    finally:
        ranks.stop(processes)
    logs = "\n".join((tmp_path / f"rank_{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
    assert (tmp_path / f"result_{survivor}.json").exists(), logs
