"""What a manager, a scheduler and a weight sender call on an engine in a Ray actor.

A new kind of remote engine is a class with these methods (``vllm/actor.py`` is one) and a pool that starts it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


ENGINE_NAMESPACE = "rlhfkit-engines"
"""Ray's namespace of all engines' actors."""

ActorFactory = Callable[[int, str], Any]
"""Creates the Ray actor of the engine with this number, the first time and when it is restarted.

It gets the given name in :data:`ENGINE_NAMESPACE`, by which the other ranks find it. It is not detached, so that it
ends with rank 0.
"""


class RemoteEngine(Protocol):
    """One engine. All methods are coroutines, so that a busy engine still answers :meth:`health`.

    Only plain values and exceptions may leave the actor, as the training process does not import the engine's package.
    A request that the engine does not accept raises :class:`~rlhfkit.rollout.errors.RefusedRequest`.
    """

    async def start(self) -> dict[str, Any]:
        """Build the engine and return its properties.

        ``max_model_len`` and ``vocabulary`` in tokens, ``pid``, ``node`` (Ray's id), and ``processes``: pid and
        creation time of each of its processes.
        """
        ...

    async def health(self) -> dict[str, Any]:
        """Return ``seconds_since_step`` (0 while there is nothing to compute) and ``paused``."""
        ...

    async def generate(self, key: str, requests: Sequence[Request]) -> list[Completion]:
        """Sample one completion per request; :meth:`abort` takes the ``key``."""
        ...

    async def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-probs of every token after the first, at temperature 1."""
        ...

    async def abort(self, keys: Sequence[str]) -> None:
        """Drop the requests of :meth:`generate` calls; unknown keys are ignored."""
        ...

    async def cut(self, keys: Sequence[str]) -> None:
        """End :meth:`generate` calls, which return what was made so far, with ``"abort"`` as reason."""
        ...

    async def pause(self) -> None:
        """Stop computing and keep the requests."""
        ...

    async def resume(self) -> None:
        """Continue; requests that were kept are computed with the current weights."""
        ...

    async def connect(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's group for weight transfers."""
        ...

    async def begin_update(self) -> None:
        """Prepare to receive weights; the engine is paused."""
        ...

    async def update(self, update_info: dict[str, Any]) -> None:
        """Receive weights; returns when all are loaded."""
        ...

    async def finish_update(self, version: int) -> None:
        """Serve the new weights under their version, once resumed."""
        ...

    async def abandon_update(self) -> None:
        """End an update that broke off, if there is one."""
        ...

    async def sleep(self, level: int) -> None:
        """Free GPU memory; at level 1 the weights are kept in main memory, at level 2 they are dropped."""
        ...

    async def wake(self, what: list[str] | None = None) -> None:
        """Take memory again: ``["weights"]``, ``["kv_cache"]``, or everything."""
        ...
