"""Metrics of calls to a sandbox: the fraction that failed, and how long they took."""

import threading
from typing import Any

import torch

from rlhfkit.rewards.sandbox.process import CallResult


class CallMetrics:
    """Count calls, from any thread, until :meth:`take`; ``name`` is the prefix of each metric."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._outcomes: list[tuple[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the counts."""
        return CallMetrics, (self.name,)

    def add(self, outcome: CallResult) -> None:
        """Count one call."""
        with self._lock:
            self._outcomes.append((outcome.status, outcome.seconds))

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of this method; empty if nothing was counted.

        ``<name>/timeout_fraction``, ``<name>/failed_fraction`` (timeouts included), and the quantiles
        ``<name>/seconds_p50`` and ``<name>/seconds_p99``.
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
