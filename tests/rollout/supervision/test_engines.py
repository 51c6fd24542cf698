"""Engines as two ranks see them that ask one table: real Ray actors without a model, and both ranks in one process.

Covers ``table.py`` too.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from waiting import until

from rlhfkit.rollout.errors import EngineError, WeightsNeededError
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.scheduler import RequestScheduler
from rlhfkit.rollout.supervision.table import EngineStatus, PoolSettings, Snapshot
from rollout.toy_engines import HELD, look, request, toy_engines

ray_marker = pytest.mark.ray


def seen_by(rank: int, num_ranks: int, num_engines: int) -> Engines:
    """Serving engines, as one of several ranks sees them."""
    settings = PoolSettings(num_engines=num_engines, policy=HealthPolicy(), sync_timeout=60.0, start_timeout=60.0)
    engines = [EngineStatus("engine", number, state=State.SERVING, version=0) for number in range(num_engines)]
    answers = {
        "constants": ([None] * num_engines, settings, (64, 128)),
        "snapshot": Snapshot(0, tuple(engines), False),
    }

    def call(method: str, *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        if method in answers:
            future.set_result(answers[method])
        return future

    return Engines(call, rank=rank, num_ranks=num_ranks)


@pytest.mark.parametrize(("num_engines", "num_ranks"), [(1, 4), (4, 1), (3, 6), (6, 3), (8, 8), (5, 7)])
def test_ranks_spread_their_requests_evenly_without_knowing_of_one_another(num_engines: int, num_ranks: int) -> None:
    for requests_per_rank in (1, 2, num_engines):
        load = [0] * num_engines
        for rank in range(num_ranks):
            routes = seen_by(rank, num_ranks, num_engines)
            for _ in range(requests_per_rank):
                chosen = routes.acquire(1)
                assert chosen is not None
                load[chosen.number] += 1
        most = -(-num_ranks * requests_per_rank // num_engines)
        assert max(load) <= most + (num_ranks % num_engines > 0 and requests_per_rank > 1)


def test_ranks_together_give_no_engine_more_than_it_may_have() -> None:
    ranks = [seen_by(rank, 64, 1) for rank in range(64)]
    given = 0
    for rank in ranks:
        while rank.acquire(1) is not None:
            given += 1
    assert given == 2048


class TwoRanks:
    """The engines as rank 0 and as rank 1 sees them."""

    def __init__(self, engines: Engines) -> None:
        self.first = engines
        self.second = Engines.join(engines.table_name, rank=1, num_ranks=2)

    def until(self, condition: Callable[[Engines], bool]) -> None:
        """Wait until rank 1 has learned something."""
        until(lambda: self.second.wait(0.05) or condition(self.second), report=self.second.report)

    def sync(self, version: int) -> None:
        """Send weights, once all engines are up."""
        self.first.wait_until_up(wait_for_all=True)
        self.first.end_sync(self.first.begin_sync(), version)
        self.second.update(at_once=True)

    def states(self) -> list[State]:
        """States as rank 1 knows them."""
        return [handle.state for handle in self.second.handles]


@pytest.fixture(scope="module")
def two(ray_session: None) -> Iterator[TwoRanks]:
    """Two engines that serve version 0."""
    engines = toy_engines(2, num_ranks=2, recovery_timeout=0.5)
    try:
        yield TwoRanks(engines)
    finally:
        engines.close()


def sample(two: TwoRanks, **arguments: Any) -> list[int]:
    """Token ids of one request of rank 1."""
    scheduler = RequestScheduler(two.second, timeout=60)
    scheduler.submit([request(**arguments)])
    try:
        ((completion,),) = scheduler.collect().values()
        return completion.token_ids.tolist()
    finally:
        scheduler.close()


@ray_marker
def test_another_rank_knows_what_rank_0_knows_and_asks_the_engines_itself(two: TwoRanks) -> None:
    second, first = two.second, two.first
    assert (second.max_model_len, second.vocabulary, second.num_engines) == (64, 128, 2)
    assert two.states() == [State.SERVING, State.SERVING]
    assert [handle.version for handle in second.handles] == [0, 0]
    assert sample(two, token=5) == [5, 5, 5]
    assert second.call(State.SERVING, "score", [[1, 2, 3]], doing="scoring", timeout=60) == {
        0: [[-1.0, -1.0]],
        1: [[-2.0, -2.0]],
    }
    assert [handle.num_requests for handle in (*second.handles, *first.handles)] == [0, 0, 0, 0]


@ray_marker
def test_a_weight_sync_is_waited_for(two: TwoRanks) -> None:
    handles = two.first.begin_sync()
    two.until(lambda second: not any(handle.takes_requests for handle in second.handles))
    assert two.second.acquire(1) is None
    assert two.second.expects_service
    two.first.end_sync(handles, 4)
    two.until(lambda second: [handle.version for handle in second.handles] == [4, 4])
    assert sample(two) == [7, 7, 7]


@ray_marker
def test_an_engine_that_dies_under_another_rank_is_reported_restarted_and_used_after_the_next_sync(
    two: TwoRanks,
) -> None:
    scheduler = RequestScheduler(two.second, timeout=60)
    pids = [handle.info["pid"] for handle in two.first.handles]
    jobs = [scheduler.submit([request(token, seconds=1.0)]) for token in range(8)]  # four on each engine
    two.second.mark_dead(two.second.handles[0], "its answers are broken")
    finished: dict[int, Any] = {}
    while results := scheduler.collect():
        finished |= results
    assert [finished[job][0].token_ids.tolist() for job in jobs] == [[token] * 3 for token in range(8)]
    scheduler.close()

    two.until(lambda second: second.handles[0].state is State.STALE)
    assert [handle.takes_requests for handle in two.second.handles] == [False, True]
    two.sync(5)
    for seen in (two.first, two.second):
        assert [handle.version for handle in seen.handles] == [5, 5]
        assert [handle.info["pid"] == pid for handle, pid in zip(seen.handles, pids, strict=True)] == [False, True]
        assert [handle.restarts for handle in seen.handles] == [1, 0]
    assert [handle.num_requests for handle in two.second.handles] == [0, 0]
    assert sample(two) == [7, 7, 7]


@ray_marker
def test_all_engines_failing_under_another_rank_ends_in_a_load(two: TwoRanks) -> None:
    """They are started again, so there is hope."""
    for handle in two.second.handles:
        two.second.mark_dead(handle, "it failed")
    assert not two.second.all_dead
    assert not two.second.expects_service
    with pytest.raises(WeightsNeededError, match=r"(?s)no toy engine serves.*0\.5 s.*engine 0 of 2.*engine 1 of 2"):
        sample(two)
    two.sync(6)
    assert two.states() == [State.SERVING, State.SERVING]
    assert [handle.restarts for handle in two.first.handles] == [2, 1]


@ray_marker
def test_an_engine_that_dies_while_the_others_sleep_is_restarted_when_they_wake(two: TwoRanks) -> None:
    """The policy learns on the devices meanwhile."""
    first = two.first
    first.sleep(1)
    dead = first.handles[0]
    first.mark_dead(dead, "it died while the policy learned")  # where it is decided whether it is restarted now
    assert first.handles[0] is dead
    assert dead.will_restart
    assert not first.all_dead
    first.wake()
    assert first.handles[0].restarts == dead.restarts + 1
    two.sync(7)
    two.until(lambda second: second.handles[0].state is State.SERVING)
    assert two.states() == [State.SERVING, State.SERVING]

    before = [handle.restarts for handle in first.handles]
    first.sleep(2)  # and where weights are what is needed first
    first.mark_dead(first.handles[0], "it died while the policy learned")
    first.mark_dead(first.handles[1], "it died too")
    two.sync(8)
    assert [handle.restarts for handle in first.handles] == [restarts + 1 for restarts in before]
    assert two.states() == [State.SERVING, State.SERVING]


@ray_marker
def test_an_engine_that_comes_up_while_the_others_sleep_counts_as_asleep_once_it_is(two: TwoRanks) -> None:
    first = two.first
    first.mark_dead(first.handles[0], "it died while it generated")
    first.sleep(1)  # before the new process is up
    two.until(lambda second: second.handles[0].state is State.ASLEEP)
    first.update(at_once=True)
    assert look(first.handles[0], lambda engine: engine.slept) == [1]
    assert first.handles[0].asleep
    first.wake()
    two.sync(9)
    assert two.states() == [State.SERVING, State.SERVING]


@ray_marker
def test_a_rank_of_another_cluster_reports_no_engine_as_dead(two: TwoRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfkit.rollout.supervision.engines.ENGINE_NAMESPACE", "elsewhere")
    with pytest.raises(EngineError, match=r"Ray has no actor rlhfkit-.*another Ray cluster"):
        Engines.join(two.first.table_name, rank=1, num_ranks=2)
    two.first.update(at_once=True)
    assert [handle.state for handle in two.first.handles] == [State.SERVING, State.SERVING]


@ray_marker
def test_the_end_of_the_engines_is_an_error_of_ranks_that_wait(two: TwoRanks) -> None:
    scheduler = RequestScheduler(two.second, timeout=60)
    scheduler.submit([request(seconds=HELD)])
    two.first.close()
    with pytest.raises(EngineError, match="the pool was closed while requests were in flight"):
        scheduler.collect()
    scheduler.close()
    assert two.second.closed
