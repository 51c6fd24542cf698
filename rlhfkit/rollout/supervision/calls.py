"""What is asked of remote engines and what they answer: requests, completions, and calls to several engines at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfkit.ray_calls import ActorCalls
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, RefusedRequest, RequestError
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.weight_sync.sender import Receivers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Request = tuple[list[int], dict[str, Any]]
"""Prompt token ids and the engine's own sampling parameters; ``priority`` among them, of which the lowest is next, and
``images``, what a model that sees is given of them."""


class Completion(NamedTuple):
    """What an engine has sampled for one request of T tokens; arrays, as lists take five times as long to send."""

    token_ids: "NDArray[np.int32]"
    """(T,)."""
    logprobs: "NDArray[np.float32]"
    """(T,)."""
    finish_reason: str
    version_runs: list[tuple[int, int]]
    """Versions of the weights that sampled the tokens, as (version, number of tokens) of each run of equal ones."""


def fetch(ref: Any, engine: Any, doing: str) -> Any:
    """Return the result of a remote call that has ended; ``engine`` and ``doing`` name them in messages.

    Raises RequestError if the engine refused a request, EngineFailure if it failed or died.
    """
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        raise call_error(error, engine, doing) from None


def call_error(error: BaseException, engine: Any, doing: str) -> EngineError:
    """Make the error of an engine whose call has ended with an error of Ray's; see :func:`fetch`."""
    import ray

    if not isinstance(error, ray.exceptions.RayTaskError):
        reason = _first_and_exit_detail(str(error).strip() or type(error).__name__)
        return EngineFailure(f"{engine} died while {doing} (is the machine out of memory?): {reason} {CURE}", engine)
    cause = error.cause
    if isinstance(cause, RefusedRequest):
        return RequestError(f"{engine} refused a request while {doing}: {cause}")
    return EngineFailure(f"{engine} failed while {doing}: {cause}. {CURE}", engine, str(cause))


def late_error(engines: Sequence[Any], doing: str, timeout: float) -> EngineError:
    """Make the error of engines that have not answered within ``timeout`` seconds."""
    names = ", ".join(sorted(map(str, engines)))
    return EngineError(
        f"{names} did not finish {doing} within {timeout:g} s: stopped, overloaded, or the limit is too low "
        f"(VLLMPool(..._timeout=...)). {CURE}"
    )


def _first_and_exit_detail(message: str) -> str:
    """The first line of Ray's message on a dead actor, and the one that says how its process ended, if there is one."""
    lines = message.splitlines()
    return " ".join([lines[0], *(line.strip() for line in lines[1:] if "exit detail" in line)])


class EngineCalls(ActorCalls[Any]):
    """One method called on several engines, in flight; ``look`` learns of engines that were found dead meanwhile."""

    def __init__(
        self, calls: Mapping[Any, Any], doing: str, timeout: float, look: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(calls, doing, timeout)
        self._look = look

    def fetch(self, ref: Any, actor: Any) -> Any:
        """Return the result of a call that has ended; see :func:`fetch` for what it raises."""
        return fetch(ref, actor, self.doing)

    def late(self, actors: Sequence[Any]) -> Exception:
        return late_error(actors, self.doing, self.timeout)

    def check(self, actors: Sequence[Any]) -> None:
        """Raise EngineFailure if an engine was found dead: Ray may need a while to notice that a machine is gone."""
        self._look()
        for engine in actors:
            if engine.state is State.DEAD:
                raise EngineFailure(f"{engine} died while {self.doing}: {engine.reason}. {CURE}", engine)


class EngineReceivers(Receivers):
    """Engines of a pool that are sent weights; ``timeout`` is in seconds for each step, ``look`` that of the calls."""

    def __init__(
        self,
        engines: Sequence[Any],
        workers_per_engine: int,
        address: str,
        timeout: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.engines = tuple(engines)
        numbers = [one.number * workers_per_engine + index for one in engines for index in range(workers_per_engine)]
        super().__init__(list(map(str, engines)), [workers_per_engine] * len(self.engines), address, numbers)
        self._timeout, self._look = timeout, look

    def submit(self, method: str, *args: Any, doing: str, each: Sequence[tuple[Any, ...]] | None = None) -> EngineCalls:
        refs = {
            getattr(engine.actor, method).remote(*(args if each is None else each[place])): engine
            for place, engine in enumerate(self.engines)
        }
        return EngineCalls(refs, doing, self._timeout, self._look)
