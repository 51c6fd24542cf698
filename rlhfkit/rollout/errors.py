"""What can go wrong with engines, told apart by what helps: another engine, another request, or nobody."""

from typing import Any

from rlhfkit.distributed import RecoverableError

CURE = (
    "Free what is left with close(), then start() again, or resume the run from its last checkpoint. The engines' "
    "output is in the logs of Ray's session folder."
)


class EngineError(RuntimeError):
    """Engines died, failed, or did not answer in time, and nothing is left to be tried."""


class EngineFailure(EngineError):
    """One engine died, failed, or broke off: the fault is the engine's, and another may do the same work.

    Args:
        message: What happened.
        engine: The :class:`~rlhfkit.rollout.supervision.handle.EngineHandle`.
    """

    def __init__(self, message: str, engine: Any = None) -> None:
        super().__init__(message)
        self.engine = engine

    def __reduce__(self) -> Any:
        """The engine's handle stays in its process."""
        return type(self), (str(self),)


class RequestError(EngineError, ValueError):
    """A request that no engine takes: the fault is the request's, other requests and the engines are as they were."""


class WeightsNeededError(EngineError, RecoverableError):
    """No engine serves, but some are up or starting: with the trainer's weights the same can be asked for again.

    The trainer has to send them (``version = None``, then ``load``), as ``RolloutCallback`` does.
    """


class StallError(EngineError):
    """Nothing has been finished for too long; the message holds the state of every queue and engine."""


class RefusedRequest(Exception):
    """Raised inside an engine's process for a request that it does not take; becomes a :class:`RequestError`."""
