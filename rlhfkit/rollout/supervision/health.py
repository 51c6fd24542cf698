"""When an engine counts as dead, and what it may do in between: pure bookkeeping, with the time passed in.

The numbers and the rule that a restarted engine serves nothing before it was sent the current weights are NeMo-RL's.
"""

from dataclasses import dataclass
from enum import Enum

from rlhfkit.validation import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """How engines are watched, and what is done about those that fail.

    Example::

        VLLMPool(num_engines=8, health=HealthPolicy(max_restarts=20))

    Raises:
        ValueError: If a number is out of range.
    """

    probe_period: float = 5.0
    """Seconds between two questions to an engine (NeMo-RL: 5)."""
    probe_timeout: float = 2.0
    """Seconds after which an unanswered question counts as missed (NeMo-RL: 2). An engine that misses one gets no new
    requests until it has answered."""
    probe_failures: int = 3
    """So many missed one after another, and the engine is killed (NeMo-RL: 3)."""
    silence_timeout: float = 300.0
    """Seconds that a busy engine may answer without its model's process having made a step: a long prompt on a slow
    processor takes many."""
    max_restarts: int = 5
    """Times that one engine is started again (NeMo-RL: 5); 0: never."""
    request_attempts: int = 5
    """Engines that may fail while working on one request (NeMo-RL: 5): a request that kills them has an end."""
    recovery_timeout: float = 60.0
    """Seconds that ``generate`` waits, when no engine serves, for a weight sync of another thread to bring one back."""
    report_after: float = 120.0
    """Seconds without a finished sample after which the state of everything is logged, and again each time they pass;
    ``VLLMPool(generate_timeout=...)`` is the end of waiting."""

    def __post_init__(self) -> None:
        """Check every field once, where it is written."""
        for name in ("probe_period", "probe_timeout", "silence_timeout", "report_after"):
            check_number(name, getattr(self, name), above=0, why="it is in seconds")
        for name, least in (("probe_failures", 1), ("request_attempts", 1), ("max_restarts", 0)):
            check_integer(name, getattr(self, name), minimum=least)
        check_number("recovery_timeout", self.recovery_timeout, minimum=0, why="it is in seconds")

    @property
    def detection_seconds(self) -> float:
        """After so long at most, an engine that was stopped counts as dead."""
        return self.probe_period * self.probe_failures + self.probe_timeout


class State(Enum):
    """What one engine process may do. Only ``SERVING`` ones are given requests."""

    STARTING = "starting"
    STALE = "up, waiting for weights"
    SYNCING = "receiving weights"
    SERVING = "serving"
    ASLEEP = "asleep"
    DEAD = "dead"


# A process that has died never comes back: its successor begins at STARTING.
_NEXT: dict[State, tuple[State, ...]] = {
    State.STARTING: (State.STALE, State.DEAD),
    State.STALE: (State.SYNCING, State.SERVING, State.ASLEEP, State.DEAD),
    State.SYNCING: (State.SERVING, State.STALE, State.DEAD),
    State.SERVING: (State.SYNCING, State.ASLEEP, State.STALE, State.DEAD),
    State.ASLEEP: (State.SYNCING, State.SERVING, State.STALE, State.DEAD),
    State.DEAD: (),
}


def may_follow(before: State, after: State) -> bool:
    """Whether a process in one state may come into another.

    Args:
        before: Its state.
        after: Asked for.
    """
    return after in _NEXT[before]


class Probes:
    """The questions to one engine process and its answers, and the verdict.

    One question is open at a time; while it stays open, every further ``probe_period`` counts as one more missed, as
    nothing would be learnt from asking someone again who has not answered yet.

    Args:
        policy: The numbers.
        now: Seconds, from any clock that only goes forward.
    """

    def __init__(self, policy: HealthPolicy, now: float) -> None:
        self._policy = policy
        self._asked: float | None = None
        self.last_answer = now
        """When the engine answered last."""

    def due(self, now: float) -> bool:
        """Whether it is time for a question.

        Args:
            now: Seconds.
        """
        return self._asked is None and now - self.last_answer >= self._policy.probe_period

    def asked(self, now: float) -> None:
        """A question was sent.

        Args:
            now: Seconds.
        """
        self._asked = now

    def answered(self, now: float) -> None:
        """It was answered.

        Args:
            now: Seconds.
        """
        self._asked, self.last_answer = None, now

    def excuse(self, seconds: float) -> None:
        """Time that does not count, as whoever asks was not running himself.

        Args:
            seconds: How long.
        """
        self.last_answer += seconds
        if self._asked is not None:
            self._asked += seconds

    def missed(self, now: float) -> int:
        """Questions missed so far, one after another.

        Args:
            now: Seconds.
        """
        if self._asked is None:
            return 0
        late = now - self._asked - self._policy.probe_timeout
        return 0 if late < 0 else 1 + int(late // self._policy.probe_period)

    def dead(self, now: float) -> bool:
        """Whether the engine counts as dead.

        Args:
            now: Seconds.
        """
        return self.missed(now) >= self._policy.probe_failures
