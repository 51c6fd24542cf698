"""When an engine is declared dead, and the states it passes through: bookkeeping only, with the time passed in.

The defaults, and the rule that a restarted engine serves nothing before it has the current weights, are NeMo-RL's.
"""

from dataclasses import dataclass
from enum import Enum

from rlhfkit.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """How engines are probed, and how often they and their requests are tried again.

    Example::

        VLLMPool(num_engines=8, health=HealthPolicy(max_restarts=20))

    Raises:
        ValueError: If a number is out of range.
    """

    probe_period: float = 5.0
    """Seconds between two health probes of an engine (NeMo-RL: 5)."""
    probe_timeout: float = 2.0
    """Seconds after which an unanswered probe counts as missed (NeMo-RL: 2). An engine that missed one gets no new
    requests until it has answered."""
    probe_failures: int = 3
    """Consecutive missed probes after which an engine is killed (NeMo-RL: 3)."""
    step_timeout: float = 300.0
    """Seconds that a busy engine may answer probes without making a step; a long prompt on a CPU takes many."""
    max_restarts: int = 5
    """Restarts of one engine (NeMo-RL: 5); 0: none."""
    request_attempts: int = 5
    """Attempts at one request on engines that die (NeMo-RL: 5), so that a request that kills engines is given up."""
    recovery_timeout: float = 60.0
    """Seconds that ``generate`` waits, when no engine serves, for a weight sync in another thread to bring one back."""
    report_after: float = 120.0
    """Seconds without a finished request after which the state of all engines is logged, and again each time they pass.
    ``VLLMPool(generate_timeout=...)`` ends the wait."""

    def __post_init__(self) -> None:
        for name in ("probe_period", "probe_timeout", "step_timeout", "report_after"):
            check_number(name, getattr(self, name), above=0, why="it is in seconds")
        for name, least in (("probe_failures", 1), ("request_attempts", 1), ("max_restarts", 0)):
            check_integer(name, getattr(self, name), minimum=least)
        check_number("recovery_timeout", self.recovery_timeout, minimum=0, why="it is in seconds")

    @property
    def detection_seconds(self) -> float:
        """Longest time until a stopped engine is declared dead."""
        return self.probe_period * self.probe_failures + self.probe_timeout


class State(Enum):
    """State of an engine process. Only ``SERVING`` ones are given requests."""

    STARTING = "starting"
    STALE = "up, waiting for weights"
    SYNCING = "receiving weights"
    SERVING = "serving"
    ASLEEP = "asleep"
    DEAD = "dead"


# A dead process stays dead: its successor begins at STARTING.
_NEXT: dict[State, tuple[State, ...]] = {
    State.STARTING: (State.STALE, State.DEAD),
    State.STALE: (State.SYNCING, State.SERVING, State.ASLEEP, State.DEAD),
    State.SYNCING: (State.SERVING, State.STALE, State.ASLEEP, State.DEAD),
    State.SERVING: (State.SYNCING, State.ASLEEP, State.STALE, State.DEAD),
    State.ASLEEP: (State.SYNCING, State.SERVING, State.STALE, State.DEAD),
    State.DEAD: (),
}


def can_follow(before: State, after: State) -> bool:
    return after in _NEXT[before]


class Probes:
    """The health probes of one engine process; times are in seconds of a monotonic clock.

    One probe is open at a time. While it stays open, every further ``probe_period`` counts as one more missed.
    """

    def __init__(self, policy: HealthPolicy, now: float) -> None:
        self._policy = policy
        self._sent_at: float | None = None
        self.last_answer = now
        """When the engine answered last."""

    def due(self, now: float) -> bool:
        return self._sent_at is None and now - self.last_answer >= self._policy.probe_period

    def sent(self, now: float) -> None:
        self._sent_at = now

    def answered(self, now: float) -> None:
        self._sent_at, self.last_answer = None, now

    def discount(self, seconds: float) -> None:
        """Ignore the seconds for which this process was itself suspended."""
        self.last_answer += seconds
        if self._sent_at is not None:
            self._sent_at += seconds

    def missed(self, now: float) -> int:
        """Number of consecutive probes that were missed."""
        if self._sent_at is None:
            return 0
        late = now - self._sent_at - self._policy.probe_timeout
        return 0 if late < 0 else 1 + int(late // self._policy.probe_period)

    def failed(self, now: float) -> bool:
        """Whether enough probes were missed to declare the engine dead."""
        return self.missed(now) >= self._policy.probe_failures
