"""``ActorCalls``: one method called on several Ray actors at once, and what an error of Ray's says in a line."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

Actor = TypeVar("Actor")

_POLL_SECONDS = 1.0


class ActorCalls(Generic[Actor]):
    """Calls in flight, of which each must end within a common limit.

    Args:
        calls: What each reference of Ray's is the answer of: an actor, as messages name it.
        doing: The work in messages: "loading weights".
        timeout: Seconds from now.
        error_type: Raised if an actor fails or is late.
    """

    def __init__(
        self, calls: Mapping[Any, Actor], doing: str, timeout: float, error_type: type[Exception] = RuntimeError
    ) -> None:
        self._order = list(calls)
        self._waiting = dict(calls)
        self._results: dict[Any, Any] = {}
        self._error_type = error_type
        self.doing, self.timeout = doing, timeout
        self._deadline = time.monotonic() + timeout

    def poll(self) -> None:
        """Raise if an actor has failed already."""
        self._collect(0.0)

    def result(self) -> list[Any]:
        """Wait for all, and return their results in the order of the calls.

        Raises:
            Exception: That of :meth:`failed` as soon as an actor has failed, that of :meth:`late` when time is up.
        """
        while self._waiting:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self.late(list(self._waiting.values()))
            self._collect(min(left, _POLL_SECONDS))
        return [self._results[ref] for ref in self._order]

    def _collect(self, timeout: float) -> None:
        """Take the results that are ready, after waiting for one of them."""
        import ray

        if not self._waiting:
            return
        for ref in ray.wait(list(self._waiting), num_returns=1, timeout=timeout)[0]:
            self._results[ref] = self.fetch(ref, self._waiting.pop(ref))
        self.check(list(self._waiting.values()))

    def fetch(self, ref: Any, actor: Actor) -> Any:
        """Return the result of a call that has ended, or raise."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            raise self.failed(actor, error) from error

    def failed(self, actor: Actor, error: Exception) -> Exception:
        """Make the error of an actor whose call has failed with an error of Ray's."""
        return self._error_type(f"{actor} failed while {self.doing}: {cause_of(error)}")

    def late(self, actors: Sequence[Actor]) -> Exception:
        """Make the error of actors that have not answered in time."""
        names = ", ".join(sorted(map(str, actors)))
        return self._error_type(f"{names} did not finish {self.doing} within {self.timeout:g} s")

    def check(self, actors: Sequence[Actor]) -> None:
        """Raise if one of the actors that are waited for is known to be dead."""


def cause_of(error: BaseException) -> str:
    """Return the last line of an error of Ray's, which holds the remote traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def first_lines_of(error: BaseException, count: int = 6) -> str:
    """Return the first lines of an error of Ray's, which say how a process has ended, as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) or type(error).__name__
