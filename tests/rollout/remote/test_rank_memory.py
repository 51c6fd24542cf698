"""Sleep and wake-up of engines beside training, at both levels, with stand-ins for engines that refuse without memory.

Callback, Trainer and pool are real; the order of what they do is that of ``callbacks/rollout/parts/shared_devices.py``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from strategies import ranks
from waiting import until

from rlhfkit.callbacks import SharedDevices
from rlhfkit.rollout.supervision.health import State
from rollout.remote.sleeping_engines import (
    Recorder,
    SleepingPool,
    events,
    merged,
    parity,
    phases_of_a_run,
    run,
)

pytestmark = [pytest.mark.ray]

LEVELS = pytest.mark.parametrize("level", [1, 2])


@pytest.fixture(scope="module")
def shared(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SleepingPool]:
    """One engine for all runs of this file."""
    pool = SleepingPool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.really_close()


@pytest.fixture
def pool(shared: SleepingPool, monkeypatch: pytest.MonkeyPatch, request: Any) -> SleepingPool:
    monkeypatch.setattr(shared, "sleep_level", request.getfixturevalue("level"))
    return shared


@pytest.fixture(scope="module")
def apart(shared: SleepingPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is learned from an engine that has memory of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "colocate", False)
        return run(tmp_path_factory.mktemp("apart"), shared)


@LEVELS
def test_everything_happens_in_the_order_that_device_phases_documents(
    pool: SleepingPool, tmp_path: Path, apart: dict[str, Any], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recorded order of the rank's calls and the engine's; what is learned is what an engine apart gives."""
    recorder = Recorder(monkeypatch)
    events(pool)
    found = run(tmp_path, pool, parts=[SharedDevices(True)])
    assert all(found[name] == apart[name] for name in ("digest", "tokens"))
    assert found["metrics"]["val/reward"] == apart["metrics"]["val/reward"]
    seen, expected = merged(recorder.log, events(pool)), phases_of_a_run(level)
    assert seen[-len(expected) :] == expected
    # All of the device is free when engines start; one that runs already frees it.
    start = [one for one in seen[: -len(expected)] if "sleep" not in one]
    assert start == ["rank: all states leave", "rank: states are back"]


@pytest.mark.parametrize("level", [2])
def test_after_an_error_the_next_run_begins_as_the_first(
    pool: SleepingPool, tmp_path: Path, apart: dict[str, Any], level: int
) -> None:
    calls: list[int] = []

    def broken(samples: Any) -> list[float]:
        calls.append(len(samples))
        if len(calls) == 2:  # in the first iteration, after the validation
            raise ArithmeticError("the reward is broken")
        return parity(samples)

    with pytest.raises(ArithmeticError):
        run(tmp_path, pool, reward=broken, parts=[SharedDevices(True)])
    assert pool.version is None
    found = run(tmp_path, pool, parts=[SharedDevices(True)])
    assert all(found[name] == apart[name] for name in ("digest", "tokens"))


@LEVELS
def test_an_engine_that_dies_asleep_gets_the_weights_that_the_pool_thinks_it_has(
    pool: SleepingPool, tmp_path: Path, apart: dict[str, Any], level: int
) -> None:
    """It is restarted when it is needed, without weights, and is sent them before the next sample."""
    import ray

    assert pool.engines is not None
    engines, killed = pool.engines, []

    def kill_once() -> None:
        if killed:
            return
        killed.append(engines.handles[0])
        ray.kill(killed[0].actor, no_restart=False)
        until(lambda: engines.wait(0.05) or killed[0].state is State.DEAD)
        engines.update(at_once=True)
        assert engines.handles[0] is killed[0]  # training has the memory

    each = LambdaCallback(on_train_batch_start=lambda *_: kill_once())
    found = run(tmp_path, pool, parts=[SharedDevices(True)], callbacks=[each])
    assert engines.handles[0].restarts == killed[0].restarts + 1
    assert all(found[name] == apart[name] for name in ("digest", "tokens"))


@pytest.mark.distributed
def test_every_rank_frees_memory_before_an_engine_takes_it(tmp_path: Path) -> None:
    """Two ranks and one engine, on the first one's device: the other exports nothing, and frees its own memory."""
    first, second = ranks.run("rollout.remote.sleeping_engines:on_ranks", 2, tmp_path)
    assert first["digest"] == second["digest"]
    assert (first["exported"], second["exported"]) == (5, 0)
    for rank in (first, second):
        seen = merged(rank["log"], first["engine"])
        assert seen[-len(phases_of_a_run(2)) :] == phases_of_a_run(2)
