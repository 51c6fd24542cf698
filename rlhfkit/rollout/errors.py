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
    """One engine died, failed, or was interrupted; another may do the same work.

    Args:
        message: What happened.
        engine: The :class:`~rlhfkit.rollout.supervision.handle.EngineHandle`.
    """

    def __init__(self, message: str, engine: Any = None) -> None:
        super().__init__(message)
        self.engine = engine

    def __reduce__(self) -> Any:
        """Pickle without the handle, which is of use in its own process only."""
        return type(self), (str(self),)


class RequestError(EngineError, ValueError):
    """A request that no engine accepts; other requests and the engines are unaffected."""


class WeightsNeededError(EngineError, RecoverableError):
    """No engine serves, but some are up or starting and will serve once they are sent the trainer's weights.

    Setting ``version = None`` on the engine and calling ``load`` sends them, as ``RolloutCallback`` does; then the
    request can be repeated.
    """


class StallError(EngineError):
    """Nothing was finished for too long; the message describes the state of every queue and engine."""


class RefusedRequest(Exception):
    """Raised inside an engine's process for a request that it does not accept; becomes a :class:`RequestError`."""
