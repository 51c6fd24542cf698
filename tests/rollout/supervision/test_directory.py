"""Engines of rank 0 as other ranks see them: real Ray actors without a model, and two ranks in one process.

Covers ``router.py`` too.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhfkit.rank_store import LocalStore
from rlhfkit.rollout.errors import EngineError, WeightsNeededError
from rlhfkit.rollout.remote.scheduler import RequestScheduler
from rlhfkit.rollout.supervision.directory import EngineDirectory, EnginePublisher
from rlhfkit.rollout.supervision.handle import RoutedEngine
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.supervision.router import EngineRouter
from rollout.toy_engines import request, toy_manager

ray_marker = pytest.mark.ray


class Routes(EngineRouter[RoutedEngine]):
    """Serving engines, as one of several ranks sees them."""

    def __init__(self, num_engines: int, rank: int, num_ranks: int) -> None:
        super().__init__(num_engines, "engine", HealthPolicy(), rank=rank, num_ranks=num_ranks)
        self._handles = [RoutedEngine(f"engine {number}", number, None, "") for number in range(num_engines)]
        for handle in self._handles:
            handle.state = State.SERVING


@pytest.mark.parametrize(("num_engines", "num_ranks"), [(1, 4), (4, 1), (3, 6), (6, 3), (8, 8), (5, 7)])
def test_ranks_spread_their_requests_evenly_without_knowing_of_one_another(num_engines: int, num_ranks: int) -> None:
    for requests_per_rank in (1, 2, num_engines):
        load = [0] * num_engines
        for rank in range(num_ranks):
            routes = Routes(num_engines, rank, num_ranks)
            for _ in range(requests_per_rank):
                chosen = routes.acquire(1)
                assert chosen is not None
                load[chosen.number] += 1
        most = -(-num_ranks * requests_per_rank // num_engines)
        assert max(load) <= most + (num_ranks % num_engines > 0 and requests_per_rank > 1)


def test_ranks_together_give_no_engine_more_than_it_may_have() -> None:
    ranks = [Routes(1, rank, 64) for rank in range(64)]
    given = 0
    for rank in ranks:
        while rank.acquire(1) is not None:
            given += 1
    assert given == 2048


class TwoRanks:
    """Rank 0's manager, and rank 1's directory of the same engines; messages pass through one memory."""

    def __init__(self, manager: EngineManager) -> None:
        stores = [LocalStore(), LocalStore()]
        for rank, store in enumerate(stores):
            store.rank, store.world_size = rank, 2
            store._values, store._logs = stores[0]._values, stores[0]._logs
        self.manager = manager
        self.publisher = EnginePublisher(manager, stores[0])
        self.directory = EngineDirectory(self.publisher.info, stores[1])

    def until(self, condition: Callable[[EngineDirectory], bool]) -> None:
        """Wait until rank 1 has learned something."""
        end = time.monotonic() + 120
        while not condition(self.directory):
            assert time.monotonic() < end, self.directory.report()
            self.directory.wait(0.05)

    def sync(self, version: int) -> None:
        """Send weights, once all engines are up."""
        self.manager.wait_until_up(wait_for_all=True)
        self.manager.end_sync(self.manager.begin_sync(), version)
        self.directory.update(at_once=True)

    def states(self) -> list[State]:
        """States as rank 1 knows them."""
        return [handle.state for handle in self.directory.handles]


@pytest.fixture(scope="module")
def two(ray_session: None) -> Iterator[TwoRanks]:
    """Two engines that serve version 0."""
    manager = toy_manager(2, num_ranks=2, recovery_timeout=0.5)
    try:
        yield TwoRanks(manager)
    finally:
        manager.close()


def sample(two: TwoRanks, **arguments: Any) -> list[int]:
    """Token ids of one request of rank 1."""
    scheduler = RequestScheduler(two.directory, timeout=30)
    scheduler.submit([request(**arguments)])
    try:
        ((completion,),) = scheduler.collect().values()
        return completion.token_ids.tolist()
    finally:
        scheduler.close()


@ray_marker
def test_another_rank_knows_what_rank_0_knows_and_asks_the_engines_itself(two: TwoRanks) -> None:
    directory, manager = two.directory, two.manager
    assert (directory.max_model_len, directory.vocabulary, directory.num_engines) == (64, 128, 2)
    assert two.states() == [State.SERVING, State.SERVING]
    assert [handle.version for handle in directory.handles] == [0, 0]
    assert sample(two, token=5) == [5, 5, 5]
    assert directory.call(State.SERVING, "score", [[1, 2, 3]], doing="scoring", timeout=10) == {
        0: [[-1.0, -1.0]],
        1: [[-1.0, -1.0]],
    }
    assert [handle.num_requests for handle in (*directory.handles, *manager.handles)] == [0, 0, 0, 0]


@ray_marker
def test_a_weight_sync_is_waited_for(two: TwoRanks) -> None:
    handles = two.manager.begin_sync()
    two.until(lambda directory: not any(handle.takes_requests(0.0) for handle in directory.handles))
    assert two.directory.acquire(1) is None
    assert two.directory.expects_service
    two.manager.end_sync(handles, 4)
    two.until(lambda directory: [handle.version for handle in directory.handles] == [4, 4])
    assert sample(two) == [7, 7, 7]


@ray_marker
def test_an_engine_that_dies_under_another_rank_is_reported_restarted_and_used_after_the_next_sync(
    two: TwoRanks,
) -> None:
    scheduler = RequestScheduler(two.directory, timeout=30)
    names = [handle.actor_name for handle in two.manager.handles]
    jobs = [scheduler.submit([request(token, seconds=1.0)]) for token in range(8)]  # four on each engine
    two.directory.mark_dead(two.directory.handles[0], "its answers are broken")
    finished: dict[int, Any] = {}
    while results := scheduler.collect():
        finished |= results
    assert [finished[job][0].token_ids.tolist() for job in jobs] == [[token] * 3 for token in range(8)]
    scheduler.close()

    two.until(lambda directory: directory.handles[0].state is State.STALE)
    chosen = two.directory.acquire(1)
    assert chosen is two.directory.handles[1]
    two.directory.release(chosen, 1)
    two.sync(5)
    assert [handle.version for handle in two.directory.handles] == [5, 5]
    assert two.manager.handles[0].restarts == 1
    assert [handle.actor_name == name for handle, name in zip(two.directory.handles, names, strict=True)] == [0, 1]
    assert two.directory.handles[0].actor_name == two.manager.handles[0].actor_name
    assert [handle.num_requests for handle in two.directory.handles] == [0, 0]
    assert sample(two) == [7, 7, 7]


@ray_marker
def test_all_engines_failing_under_another_rank_ends_in_a_load(two: TwoRanks) -> None:
    """Before rank 0 has read of it as well: there is hope."""
    for handle in two.directory.handles:
        two.directory.mark_dead(handle, "it failed")
    assert not two.directory.all_dead
    assert not two.directory.expects_service
    scheduler = RequestScheduler(two.directory, timeout=30)
    scheduler.submit([request()])
    with pytest.raises(WeightsNeededError, match=r"(?s)no toy engine serves.*0\.5 s.*engine 0 of 2.*engine 1 of 2"):
        scheduler.collect()
    scheduler.close()
    two.sync(6)
    assert two.states() == [State.SERVING, State.SERVING]
    assert [handle.restarts for handle in two.manager.handles] == [2, 1]


@ray_marker
def test_an_engine_that_dies_while_the_others_sleep_is_restarted_when_they_wake(two: TwoRanks) -> None:
    """The policy learns on the devices meanwhile."""
    manager = two.manager
    manager.sleep(1)
    dead = manager.handles[0]
    manager.mark_dead(dead, "it died while the policy learned")
    time.sleep(0.5)
    assert manager.handles[0] is dead
    assert dead.will_restart
    assert not manager.all_dead
    manager.wake()
    assert manager.handles[0].restarts == dead.restarts + 1
    two.sync(7)
    two.until(lambda directory: directory.handles[0].state is State.SERVING)
    assert two.states() == [State.SERVING, State.SERVING]

    before = [handle.restarts for handle in manager.handles]
    manager.sleep(2)  # and where weights are what is needed first
    manager.mark_dead(manager.handles[0], "it died while the policy learned")
    manager.mark_dead(manager.handles[1], "it died too")
    two.sync(8)
    assert [handle.restarts for handle in manager.handles] == [restarts + 1 for restarts in before]
    assert two.states() == [State.SERVING, State.SERVING]


@ray_marker
def test_an_engine_that_comes_up_while_the_others_sleep_counts_as_asleep_once_it_is(two: TwoRanks) -> None:
    import ray

    manager = two.manager
    manager.mark_dead(manager.handles[0], "it died while it generated")
    manager.sleep(1)  # before the new process is up
    two.until(lambda _: manager.handles[0].state is State.ASLEEP)
    assert ray.get(manager.handles[0].actor.levels_slept.remote()) == [1]
    assert manager.handles[0].asleep
    manager.wake()
    two.sync(9)
    assert two.states() == [State.SERVING, State.SERVING]


@ray_marker
def test_a_rank_of_another_cluster_reports_no_engine_as_dead(two: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfkit.rollout.supervision.directory.ENGINE_NAMESPACE", "elsewhere")
    with pytest.raises(EngineError, match=r"Ray has no actor rlhfkit-.*another Ray cluster"):
        EngineDirectory(two.publisher.info, two.directory._store)
    time.sleep(0.5)
    assert [handle.state for handle in two.manager.handles] == [State.SERVING, State.SERVING]


@ray_marker
def test_the_end_of_the_engines_is_an_error_of_ranks_that_wait(two: TwoRanks) -> None:
    scheduler = RequestScheduler(two.directory, timeout=30)
    scheduler.submit([request(seconds=60.0)])
    two.manager.close()
    two.publisher.close()
    with pytest.raises(EngineError, match="the pool was closed while requests were in flight"):
        scheduler.collect()
    scheduler.close()
    assert two.directory.closed
