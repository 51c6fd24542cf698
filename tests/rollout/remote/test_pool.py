"""Ranks that ask one engine, and ranks that die while it works for them: real ranks and Ray, without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strategies import ranks
from waiting import until

from rollout.remote.pool_ranks import RankOnRay
from rollout.remote.sleeping_engines import merged, phases_of_a_run

pytestmark = [pytest.mark.distributed, pytest.mark.ray]


@pytest.fixture(scope="module")
def two_ranks(ray_session: None) -> Iterator[list[Any]]:
    """Two training ranks that Ray has started."""
    import ray

    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    kind = ray.remote(RankOnRay).options(num_cpus=0, runtime_env={"env_vars": path})
    actors = [kind.remote(rank) for rank in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def test_ranks_that_ray_has_started_ask_for_themselves(two_ranks: list[Any]) -> None:
    import ray

    port = ranks.free_port()
    ray.get([actor.run.remote(port) for actor in two_ranks], timeout=120)


def test_every_rank_frees_memory_before_an_engine_takes_it(two_ranks: list[Any], tmp_path: Path) -> None:
    """Two ranks and one engine, on the first one's device: the other exports nothing, and frees its own memory."""
    import ray

    port = ranks.free_port()
    first, second = ray.get([actor.run.remote(port, tmp_path) for actor in two_ranks], timeout=120)
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
