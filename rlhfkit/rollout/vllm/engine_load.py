"""``EngineLoad``: how busy a vLLM engine is, from what its scheduler reports after each step."""

from typing import Any


class EngineLoad:
    """A stat logger of vLLM 0.32 and 0.33 (``vllm.v1.metrics.loggers.StatLoggerBase``), without its base class."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._steps, self._running, self._waiting, self._cache = 0, 0, 0, 0.0

    def factory(self, config: Any, number: int = 0) -> "EngineLoad":
        """Return this object, for each replica of the engine that vLLM makes a logger for."""
        return self

    def record(self, scheduler_stats: Any, *more: Any, **others: Any) -> None:
        """Add a step; ``scheduler_stats`` are vLLM's ``SchedulerStats``, or ``None``."""
        if scheduler_stats is None:
            return
        self._steps += 1
        self._running += scheduler_stats.num_running_reqs
        self._waiting += scheduler_stats.num_waiting_reqs
        self._cache = max(self._cache, scheduler_stats.kv_cache_usage)

    def take(self) -> dict[str, float]:
        """Return the load since the last call: means of requests over steps, and the most of the cache; 0 to 1."""
        steps = max(self._steps, 1)
        found = {"running": self._running / steps, "waiting": self._waiting / steps, "kv_cache": self._cache}
        steps = self._steps
        self._forget()
        return found if steps else {}

    def log_engine_initialized(self) -> None:
        """Nothing is written."""

    def log(self) -> None:
        """Nothing is written."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Sleep is not counted."""
