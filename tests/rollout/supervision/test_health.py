"""Health of engines without engines: the rules, and that no order of events breaks them. Covers ``errors.py`` too."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


class EngineLife(RuleBasedStateMachine):
    """Any order of events in the life of one engine process.

    What it holds is kept here by other means than the state: the version of the last transfer that was completed.
    """

    def __init__(self) -> None:
        super().__init__()
        settings = PoolSettings(
            num_engines=1,
            engine_name="engine",
            policy=HealthPolicy(),
            workers_per_engine=1,
            sync_timeout=60.0,
            start_timeout=60.0,
            has_weights=False,
        )
        self.handle = EngineProcess(0, None, settings)
        self.complete: int | None = None
        self.versions = 0
        self.died = False

    def _try(self, state: State) -> bool:
        before = self.handle.state
        if can_follow(before, state):
            self.handle.change_state(state)
            return True
        with pytest.raises(RuntimeError, match="cannot become"):
            self.handle.change_state(state)
        assert self.handle.state is before
        return False

    @rule()
    def comes_up(self) -> None:
        if self.handle.state is State.STARTING:
            self._try(State.STALE)

    @rule(completed=st.booleans())
    def weights_are_sent(self, completed: bool) -> None:
        if not self._try(State.SYNCING):
            return
        self.complete = None
        assert not Engine(None, self.handle.status()).takes_requests
        if completed:
            self.versions += 1
            self.complete = self.versions
            self._try(State.SERVING)
        else:
            self._try(State.STALE)

    @rule()
    def falls_asleep(self) -> None:
        if self.handle.state in (State.SERVING, State.STALE) and self._try(State.ASLEEP):
            self.complete = None

    @precondition(lambda self: self.handle.state is State.ASLEEP)
    @rule()
    def wakes(self) -> None:
        self._try(State.STALE)

    @rule()
    def dies(self) -> None:
        self.died = self._try(State.DEAD) or self.died

    @rule(state=st.sampled_from(State))
    def a_dead_one_never_comes_back(self, state: State) -> None:
        if self.died:
            assert not self._try(state)

    @invariant()
    def serves_only_what_was_sent_completely(self) -> None:
        if Engine(None, self.handle.status()).takes_requests:
            assert self.complete is not None
            assert not self.died


TestEngineLife = EngineLife.TestCase


def test_a_failure_travels_between_processes_without_the_engine() -> None:
    import pickle

    failure = pickle.loads(pickle.dumps(EngineFailure("engine 0 died", engine=object(), cause="no memory")))
    assert str(failure) == "engine 0 died"
    assert failure.engine is None
    assert failure.cause == "no memory"
