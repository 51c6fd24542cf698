"""Errors of rollout engines, told apart by what helps: another engine, another request, or nothing."""

from typing import Any

from rlhfkit.distributed import RecoverableError

CURE = (
    "Free what is left with close(), then start() again, or resume the run from its last checkpoint. The engines' "
    "output is in the logs of Ray's session folder."
)


class EngineError(RuntimeError):
    """Engines died, failed, or did not answer in time, and nothing is left to be tried."""


class EngineFailure(EngineError):
    """One engine (``engine``, an ``Engine``) died, failed, or was interrupted; another may do the same work.

    ``cause`` is the error that the engine raised; empty if its process ended.
    """

    def __init__(self, message: str, engine: Any = None, cause: str = "") -> None:
        super().__init__(message)
        self.engine = engine
        self.cause = cause

    def __reduce__(self) -> Any:
        """Pickle without the handle, which is valid in its own process only."""
        return type(self), (str(self), None, self.cause)


class RequestError(EngineError, ValueError):
    """A request that no engine accepts; other requests and the engines are unaffected."""


class WeightsNeededError(EngineError, RecoverableError):
    """No engine serves, but some are up or starting and will serve once they are sent the trainer's weights.

    To recover, as ``RolloutCallback`` does: set the engine's ``version`` to ``None``, call ``load``, try again.
    """


class StallError(EngineError):
    """Nothing was finished for too long; the message describes every queue and engine."""


class RefusedRequest(Exception):
    """Raised inside an engine's process for an invalid request; becomes a :class:`RequestError`."""
