"""Requests of one caller, and of ranks that die: real Ray actors without a model."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from strategies import ranks
from waiting import until

from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.errors import EngineError, StallError
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.supervision.scheduler import RequestScheduler
from rlhfkit.rollout.vllm.stream import PoolStream
from rollout.toy_engines import BREAKS, HELD, look, request, toy_engines

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def engines(ray_session: None) -> Iterator[Engines]:
    """One engine that serves."""
    made = toy_engines(1)
    try:
        yield made
    finally:
        made.close()


def make_request(prompt: Prompt, index: int, *, iteration: int, begun: Any = None) -> Request:
    """The answer has as many tokens as the iteration's number says, after tenths of a second as the prompt's says.

    A prompt of 90 or more is held.
    """
    first = prompt.token_ids.tolist()[0]
    return request(first, tokens=iteration, seconds=HELD if first >= 90 else first / 10)


def open_stream(engines: Engines) -> PoolStream:
    """A stream of groups of two."""
    sampling = SamplingSpec(group_size=2, max_new_tokens=8)
    return PoolStream(engines, sampling, make_request, 60.0, iteration=2, knows_logprobs=True)


def test_a_wait_ends_when_its_time_is_over_and_loses_nothing(engines: Engines) -> None:
    scheduler = RequestScheduler(engines, timeout=60)
    job = scheduler.submit([request(until="waits are over")])
    for wait in (0.0, 0.2):
        assert scheduler.collect(wait) == {}  # a wait for the job would end in a StallError
    engines.handles[0].actor.release.remote("waits are over")
    assert list(scheduler.collect(60.0)) == [job]
    assert scheduler.collect() == {}
    scheduler.close()


def test_a_caller_that_polls_learns_of_a_stall_as_one_that_waits(engines: Engines) -> None:
    clock = SimpleNamespace(now=0.0)
    scheduler = RequestScheduler(engines, timeout=1.0, clock=lambda: clock.now)
    scheduler.submit([request(seconds=HELD)])
    for clock.now in (0.0, 0.4, 0.8):
        assert scheduler.collect(0.0) == {}
    clock.now = 1.2
    with pytest.raises(StallError, match=r"no request was finished for 1 s; waiting for 1 of 1 jobs"):
        scheduler.collect(0.0)
    scheduler.close()


def test_time_that_the_caller_spends_on_results_is_no_stall(engines: Engines) -> None:
    clock = SimpleNamespace(now=0.0)
    scheduler = RequestScheduler(engines, timeout=4.0, clock=lambda: clock.now)
    first, second = scheduler.submit([request()]), scheduler.submit([request(until="results are looked at")])
    assert list(scheduler.collect()) == [first]
    clock.now = 4.1
    engines.handles[0].actor.release.remote("results are looked at")
    assert list(scheduler.collect()) == [second]
    scheduler.close()


def test_one_stream_samples_for_several_iterations_in_the_order_of_submission(engines: Engines) -> None:
    import ray

    stream = open_stream(engines)
    stream.submit([Prompt(0, [3]), Prompt(1, [1])], iteration=5)
    stream.submit([Prompt(0, [2])])
    answers = [*stream.scheduler._in_flight]
    assert len(ray.wait(answers, num_returns=3, timeout=60)[0]) == 3
    groups = stream.collect(2, wait=30.0) + stream.collect(2, wait=30.0)
    assert [(group[0].prompt.index, group[0].token_ids.tolist()) for group in groups] == [
        (0, [3] * 5),
        (1, [1] * 5),
        (0, [2] * 2),
    ]
    assert [sample.version_runs for sample in groups[0]] == [[(3, 5)], [(3, 5)]]
    assert stream.collect(1, wait=30.0) == []
    stream.close()


def test_a_stream_that_is_closed_leaves_no_request_behind(engines: Engines) -> None:
    """Neither counted here nor in the engine."""
    stream = open_stream(engines)
    stream.submit([Prompt(row, [90]) for row in range(6)])
    assert engines.handles[0].num_requests == 12
    for _ in range(2):
        stream.close()
        assert stream.collect(1) == []
    assert engines.handles[0].num_requests == 0

    def aborted() -> set[str]:
        keys = look(engines.handles[0], lambda engine: engine.aborted)
        return {key for key in keys if key.startswith(stream.scheduler._name)}

    until(lambda: len(aborted()) == 6)  # the engine is told, and not waited for


def test_an_engine_that_fails_twice_in_the_same_way_is_not_restarted_and_callers_learn_of_what(
    engines: Engines,
) -> None:
    """The last test of this file's engine: it stays dead."""

    def fail() -> str:
        handle = engines.handles[0]
        assert engines.call(State.SERVING, "score", [[BREAKS, 1]], doing="scoring sequences", timeout=60) == {}
        assert "head size 8 is not supported" in handle.reason
        return engines.report()

    def sync() -> None:
        engines.wait_until_up(wait_for_all=True)
        engines.end_sync(engines.begin_sync(), version=1)

    def answer() -> None:
        scheduler = RequestScheduler(engines, timeout=60)
        scheduler.submit([request()])
        scheduler.collect()
        scheduler.close()

    for restarts in (1, 2):  # each time it had answered a request before
        assert f"restarted {restarts} times, the last time because: toy engine 0 of 1" in fail()
        assert "failed while scoring sequences: head size 8 is not supported" in engines.report()
        assert engines.handles[0].restarts == restarts
        sync()
        answer()
    fail()
    sync()
    assert "the process before it failed in the same way" in fail()  # though the error names another object
    assert engines.handles[0].restarts == 3
    with pytest.raises(EngineError, match=r"(?s)no toy engine serves, and none is restarted:.*head size 8 is not"):
        answer()


@pytest.mark.distributed
@pytest.mark.parametrize(("scenario", "survivor"), [("a_rank_dies", 0), ("rank_0_dies", 1)])
def test_a_rank_that_dies_is_noticed_by_the_one_that_survives(tmp_path: Path, scenario: str, survivor: int) -> None:
    processes = ranks.start(f"rollout.remote.pool_ranks:{scenario}", ranks=2, folder=tmp_path)
    try:
        until(lambda: processes[survivor].poll() is not None, limit=600)
    finally:
        ranks.stop(processes)
    logs = "\n".join((tmp_path / f"rank_{rank}.log").read_text()[-3000:] for rank in range(2))
    assert (tmp_path / f"result_{survivor}.json").exists(), logs
