"""Health of engines without engines: when one is dead, and which state follows which. Covers ``errors.py`` too."""

import itertools
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlhfkit.rollout.errors import EngineFailure
from rlhfkit.rollout.supervision.engines import Engine
from rlhfkit.rollout.supervision.health import HealthPolicy, Probes, State, can_follow
from rlhfkit.rollout.supervision.table import EngineProcess, PoolSettings


class TestProbes:
    """When an engine counts as dead."""

    policy = HealthPolicy(probe_period=5, probe_timeout=2, probe_failures=3)

    def test_the_verdict_follows_the_published_numbers(self) -> None:
        probes = Probes(self.policy, now=0.0)
        assert not probes.due(4.9)
        assert probes.due(5.0)
        probes.sent(5.0)
        assert [probes.missed(now) for now in (5.0, 6.9, 7.0, 11.9, 12.0, 16.9, 17.0)] == [0, 0, 1, 1, 2, 2, 3]
        assert not probes.failed(16.9)
        assert probes.failed(17.0)
        assert self.policy.detection_seconds == 17.0  # counted from its last answer, at 0

    def test_time_in_which_nobody_could_listen_does_not_count(self) -> None:
        probes = Probes(self.policy, now=0.0)
        probes.sent(5.0)
        probes.discount(1000.0)
        assert not probes.failed(1016.0)
        assert probes.failed(1017.0)

    @given(
        answers=st.lists(st.floats(min_value=0.01, max_value=40.0), min_size=1, max_size=20),
        period=st.floats(min_value=0.1, max_value=10.0),
        timeout=st.floats(min_value=0.1, max_value=10.0),
        failures=st.integers(min_value=1, max_value=5),
    )
    def test_dead_means_silent_for_as_long_as_promised(
        self, answers: list[float], period: float, timeout: float, failures: int
    ) -> None:
        """Against the definition: an engine that takes d to answer is dead if and only if d reaches the limit."""
        policy = HealthPolicy(probe_period=period, probe_timeout=timeout, probe_failures=failures)
        probes, now = Probes(policy, now=0.0), 0.0
        limit = timeout + (failures - 1) * period
        for delay in answers:
            now += period
            assert probes.due(now + 1e-6)
            probes.sent(now)
            now += delay
            if abs(delay - limit) > 1e-6:
                assert probes.failed(now) == (delay > limit)
            if probes.failed(now):
                return
            probes.answered(now)

    def test_all_engines_stopped_is_an_error_within_two_minutes_by_default(self) -> None:
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
