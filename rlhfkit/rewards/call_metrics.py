"""How calls went: what fraction failed, and how long they took."""

import threading
from typing import Any

import torch

from rlhfkit.rewards.sandbox.process import Outcome


class CallMetrics:
    """Counts calls, from any thread, until it is asked.

    Args:
        name: Before each metric.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._outcomes: list[tuple[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Counts stay where they are when the reward is sent elsewhere."""
        return CallMetrics, (self.name,)

    def add(self, outcome: Outcome) -> None:
        """Count one.

        Args:
            outcome: Of the call.
        """
        with self._lock:
            self._outcomes.append((outcome.status, outcome.seconds))

    def take(self) -> dict[str, float]:
        """Metrics since the last time: fraction of calls that took too long, of all that failed, seconds of a call.

        Returns:
            ``<name>/timeout_fraction``, ``failed_fraction`` (those out of time among them), ``seconds_p50`` and
            ``seconds_p99`` (quantiles); nothing if there was no call.
        """
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return {}
        seconds = torch.tensor([seconds for _, seconds in outcomes], dtype=torch.float64)
        count = len(outcomes)
        return {
            f"{self.name}/timeout_fraction": sum(status == "timeout" for status, _ in outcomes) / count,
            f"{self.name}/failed_fraction": sum(status != "ok" for status, _ in outcomes) / count,
            f"{self.name}/seconds_p50": float(seconds.quantile(0.5)),
            f"{self.name}/seconds_p99": float(seconds.quantile(0.99)),
        }
