"""Ranks that ask one engine, and ranks that die while it works for them: real ranks and Ray, without a model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strategies import ranks
from waiting import until

from rollout.remote.pool_ranks import RankOnRay
from rollout.remote.sleeping_engines import merged, phases_of_a_run

pytestmark = [pytest.mark.distributed, pytest.mark.ray]


def report_of(scenario: str, survivor: int, folder: Path, num_ranks: int = 2) -> dict[str, Any]:
    """What one of several ranks reports, of which another dies."""
    processes = ranks.start(f"rollout.remote.pool_ranks:{scenario}", ranks=num_ranks, folder=folder)
    try:
        until(lambda: processes[survivor].poll() is not None, limit=600)
    finally:
        ranks.stop(processes)
    result = folder / f"result_{survivor}.json"
    assert result.exists(), "\n".join((folder / f"rank_{rank}.log").read_text()[-3000:] for rank in range(num_ranks))
    return dict(json.loads(result.read_text()))


@pytest.fixture(scope="module")
def two_ranks(ray_session: None) -> Iterator[list[Any]]:
    """Two training ranks that Ray has started."""
    import ray

    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    kind = ray.remote(RankOnRay).options(num_cpus=0, runtime_env={"env_vars": path})
    port = ranks.free_port()
    actors = [kind.remote(rank, port) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def test_ranks_that_ray_has_started_ask_for_themselves(two_ranks: list[Any]) -> None:
    import ray

    reports = ray.get([actor.ask.remote() for actor in two_ranks], timeout=120)
    for rank, report in enumerate(reports):
        assert report["tokens"] == [[1 + rank] * 3] * 2
        assert report["scores"] == [[-1.0, -1.0]]
        assert "the engines are not running" in report["closed"]


def test_every_rank_frees_memory_before_an_engine_takes_it(two_ranks: list[Any], tmp_path: Path) -> None:
    """Two ranks and one engine, on the first one's device: the other exports nothing, and frees its own memory."""
    import ray

    port = ranks.free_port()
    first, second = ray.get([actor.train.remote(tmp_path, port) for actor in two_ranks], timeout=120)
    assert first["digest"] == second["digest"]
    assert (first["exported"], second["exported"]) == (5, 0)
    for rank in (first, second):
        seen = merged(rank["log"], first["engine"])
        assert seen[-len(phases_of_a_run(2)) :] == phases_of_a_run(2)


def test_requests_of_four_ranks_outlive_an_engine_and_those_of_a_dead_rank_leave_nothing(tmp_path: Path) -> None:
    report = report_of("an_engine_and_a_rank_die", 0, tmp_path, num_ranks=4)
    assert report["begun"] == 4 * 4  # half of the eight requests of each of four ranks
    for rank, (samples, nothing_left) in enumerate(report["samples"]):  # none lost, none doubled
        assert samples == [[prompt, index, *[20 + rank] * 3] for prompt in range(4) for index in range(2)]
        assert nothing_left
    assert report["tokens"] == [1, 1, 1]  # the engines serve rank 0 after the death of rank 1
    assert report["started"] >= 4 * 4 + 4  # those of the other engine, those of the dead rank, and the last ones
    assert report["aborted"] == []
    assert (report["counted"], report["restarts"]) == (0, 0)


def test_the_death_of_rank_0_is_an_error_of_ranks_that_wait_for_samples(tmp_path: Path) -> None:
    report = report_of("rank_0_dies", 1, tmp_path)
    assert report["error"].startswith("RankError: rank 0, which holds the table of the engines, does not answer")
    assert report["seconds"] < 50  # and not the 60 in which a request must be finished
    assert report["closing"] < 50
