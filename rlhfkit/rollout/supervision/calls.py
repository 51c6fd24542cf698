"""What is asked of remote engines and what they answer: requests, completions, and calls to several engines at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhfkit.ray_calls import ActorCalls
from rlhfkit.rollout.errors import CURE, EngineError, EngineFailure, RefusedRequest, RequestError
from rlhfkit.rollout.supervision.health import State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Request = tuple[list[int], dict[str, Any]]
"""Prompt token ids and the engine's own sampling parameters; ``priority`` among them, of which the lowest is next."""


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
        """Make the error of engines that have not answered in time."""
        return late_error(actors, self.doing, self.timeout)

    def check(self, actors: Sequence[Any]) -> None:
        """Raise EngineFailure if an engine was found dead: Ray may need a while to notice that a machine is gone."""
        self._look()
        for engine in actors:
            if engine.state is State.DEAD:
                raise EngineFailure(f"{engine} died while {self.doing}: {engine.reason}. {CURE}", engine)


@dataclass(frozen=True)
class EngineReceivers:
    """Several engines as a :class:`~rlhfkit.rollout.weight_sync.sender.Receivers`."""

    engines: tuple[Any, ...]
    workers_per_engine: int
    """Processes of each engine that hold weights."""
    address: str
    """Address at which they reach this process."""
    timeout: float
    """Seconds for each step of a weight transfer."""
    look: Callable[[], None] = lambda: None
    """Learns of engines that were found dead."""

    @property
    def num_workers(self) -> int:
        """Processes that hold weights, of all engines."""
        return len(self.engines) * self.workers_per_engine

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Number of each of these processes among those of all engines: colocated, the rank whose GPU it uses."""
        each = self.workers_per_engine
        return tuple(engine.number * each + index for engine in self.engines for index in range(each))

    def worker(self, rank: int) -> str:
        """Name the engine whose worker has a rank from 1 on in the group of a transfer."""
        return str(self.engines[(rank - 1) // self.workers_per_engine])

    def submit(
        self,
        method: str,
        *args: Any,
        doing: str,
        timeout: float | None = None,
        each: Sequence[tuple[Any, ...]] | None = None,
    ) -> EngineCalls:
        """Call a method on every engine, with ``args`` or with the engine's own arguments in ``each``.

        ``doing`` names the work in messages; ``timeout`` is in seconds, by default :attr:`timeout`.
        """
        refs = {}
        for place, engine in enumerate(self.engines):
            refs[getattr(engine.actor, method).remote(*(args if each is None else each[place]))] = engine
        return EngineCalls(refs, doing, self.timeout if timeout is None else timeout, self.look)

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> EngineCalls:
        """Have every worker prepare for transfers.

        If ``ranked``, the workers of engine i get ranks from 1 + i * ``workers_per_engine``, its ``rank_offset``, on.
        """
        offsets = [{"rank_offset": 1 + i * self.workers_per_engine} if ranked else {} for i in range(len(self.engines))]
        each = [(init_info | offset,) for offset in offsets]
        return self.submit("connect", doing="joining the weight transfer", each=each)

    def update(self, update_info: dict[str, Any]) -> EngineCalls:
        """Have every worker receive weights."""
        return self.submit("update", update_info, doing="loading weights")
