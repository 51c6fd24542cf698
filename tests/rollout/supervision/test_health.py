"""Health of engines without engines: when one is dead, and which state follows which. Covers ``errors.py`` too."""

import itertools
import pickle

import pytest

from rlhfkit.rollout.errors import EngineFailure
from rlhfkit.rollout.supervision.engines import Engine
from rlhfkit.rollout.supervision.health import HealthPolicy, Probes, State, can_follow
from rlhfkit.rollout.supervision.table import EngineProcess, PoolSettings


def test_an_engine_is_dead_when_it_was_silent_for_as_long_as_promised() -> None:
    policy = HealthPolicy(probe_period=5, probe_timeout=2, probe_failures=3)
    probes = Probes(policy, now=0.0)
    assert not probes.due(4.9)
    assert probes.due(5.0)
    for start in (5.0, 30.0):  # and anew after an answer
        probes.sent(start)
        late = [0.0, 1.9, 2.0, 6.9, 7.0, 11.9, 12.0]
        assert [probes.missed(start + seconds) for seconds in late] == [0, 0, 1, 1, 2, 2, 3]
        assert not probes.failed(start + 11.9)
        assert probes.failed(start + 12.0)
        probes.answered(25.0)
        assert not probes.failed(1000.0)
    assert policy.detection_seconds == 17.0  # counted from its last answer, at 0
    probes.sent(35.0)
    probes.discount(1000.0)  # in which nobody could listen
    assert not probes.failed(1046.9)
    assert probes.failed(1047.0)


def test_all_engines_stopped_is_an_error_within_two_minutes_by_default() -> None:
    policy = HealthPolicy()
    assert policy.detection_seconds + policy.recovery_timeout < 120


def test_every_change_of_state_is_allowed_or_refused_and_only_what_serves_takes_requests() -> None:
    settings = PoolSettings(num_engines=1, sync_timeout=60.0, start_timeout=60.0, policy=HealthPolicy())
    for before, after in itertools.product(State, State):
        process = EngineProcess(0, None, settings)
        process.state = before
        assert Engine(None, process.status()).takes_requests == (before is State.SERVING)
        if can_follow(before, after):
            process.change_state(after)
            assert process.state is after
        else:
            with pytest.raises(RuntimeError, match="cannot become"):
                process.change_state(after)
            assert process.state is before
    assert not any(can_follow(State.DEAD, after) for after in State)  # it never comes back
    assert all(can_follow(before, State.DEAD) for before in State if before is not State.DEAD)
    assert not can_follow(State.STARTING, State.SERVING)  # it has no weights yet


def test_a_failure_travels_between_processes_without_the_engine() -> None:
    failure = pickle.loads(pickle.dumps(EngineFailure("engine 0 died", engine=object(), cause="no memory")))
    assert str(failure) == "engine 0 died"
    assert failure.engine is None
    assert failure.cause == "no memory"
