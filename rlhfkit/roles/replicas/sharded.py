"""``ShardedReplica``: a replica whose model is divided over several Ray actors with ZeRO 3.

It has no weights itself: it takes the requests that a :class:`~rlhfkit.roles.replica.ModelReplica` takes, and starts
the ranks that have them (:mod:`rlhfkit.roles.replicas.shard`), which read their work from it in one order.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from lightning.pytorch.strategies import Strategy

from rlhfkit.protocols import StartsRanksOnRay
from rlhfkit.roles.replica import Answer, ReplicaOptions, TokenRows
from rlhfkit.roles.replicas.shard import ShardProcess, run_shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """How a replica is divided."""

    num_ranks: int
    resources: Mapping[str, float]
    """Of each rank."""
    kind: type[Strategy]
    """Starts the ranks on Ray; with ``arguments`` it divides the model."""
    arguments: Mapping[str, Any]
    start_timeout: float
    max_restarts: int

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.resources.get("GPU") else "cpu"


@dataclass
class _Round:
    """What all ranks do together: a forward pass each, or something with the weights."""

    kind: str
    parts: list[Any]
    """Of each rank; of kind ``"rows"`` there may be fewer, and the others compute two tokens."""
    futures: list["asyncio.Future[Any]"]
    """Of each part, or the only one."""
    finished: set[int] = field(default_factory=set)


class ShardedReplica:
    """A frozen model on several ranks. An asynchronous Ray actor: calls wait for their turn.

    Each forward pass of a request is computed by one rank, with weights that all ranks gather layer by layer, so that
    the numbers are those of an undivided replica. Ranks without a request compute along. If a rank dies or weights do
    not arrive, all are ended and started again, with what they had not finished; if this actor dies, they end, and Ray
    starts it again.
    """

    def __init__(self, options: ReplicaOptions, sharding: Sharding) -> None:
        self._options, self._sharding = options, sharding
        self._rows: deque[tuple[TokenRows, asyncio.Future[Any]]] = deque()
        self._orders: deque[_Round] = deque()  # about weights; they come before rows
        self._rounds: dict[int, _Round] = {}
        self._run = uuid.uuid4().hex  # the ranks that are asked; calls of others are ignored
        self._processes: dict[int, ShardProcess] = {}  # of ranks that have loaded the model
        self._version = 0
        self._failure = ""
        self._last_finished = time.monotonic()
        self._changed = asyncio.Condition()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- the ranks

    async def load(self) -> None:
        """Start the ranks, once, and wait until they have loaded the model."""
        self._start()
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or len(self._processes) == self._sharding.num_ranks)
        self._check()

    def _start(self) -> None:
        if self._thread is None:
            import ray

            here, loop = ray.get_runtime_context().current_actor, asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._keep_running, args=(here, loop), daemon=True)
            self._thread.start()

    def _keep_running(self, here: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Run the ranks, and start them again when one has died. In a thread."""
        import ray

        sharding = self._sharding
        make_strategy: Callable[[], Strategy] = partial(sharding.kind, **sharding.arguments)
        for number in range(sharding.max_restarts + 1):
            try:
                cast(StartsRanksOnRay, sharding.kind).run_on_ray(
                    partial(run_shard, self._options, make_strategy, sharding.device, here, self._run),
                    num_ranks=sharding.num_ranks,
                    num_nodes=1,
                    resources_per_rank=dict(sharding.resources),
                    device=sharding.device,
                    timeout=sharding.start_timeout,
                    on_start=lambda actors: None,
                )
                return
            except BaseException as error:  # whoever waits is told
                ended = getattr(error, "rank_died", False) or isinstance(error, ray.exceptions.RayError)
                # Weights that do not arrive, as another replica or the sender has died, leave the ranks out of step.
                sending = any(one.kind != "rows" for one in list(self._rounds.values()))
                again = (ended or sending) and number < sharding.max_restarts
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                told = self._begin_again() if again else self._fail(f"{type(error).__name__}: {' '.join(lines[:3])}")
                asyncio.run_coroutine_threadsafe(told, loop).result()
                if not again:
                    return
                log.warning("the ranks of a sharded replica are started again: %s", error)

    async def _begin_again(self) -> None:
        """Put back what the ranks that have ended did not finish."""
        self._run = uuid.uuid4().hex
        self._version, self._processes = 0, {}
        orders = [*self._orders, *(one for one in self._rounds.values() if one.kind != "rows")]
        for one in orders:
            _set_error(one.futures[0], "the ranks of the replica have ended")
        for one in self._rounds.values():
            if one.kind == "rows":
                open_parts = zip(one.parts, one.futures, strict=True)
                self._rows.extendleft((rows, future) for rows, future in open_parts if not future.done())
        self._rounds, self._orders = {}, deque()
        await self._notify()

    async def _fail(self, message: str) -> None:
        """Everybody who waits, or asks later, gets this message."""
        self._failure = message
        waiting = [future for _, future in self._rows]
        waiting += [future for one in (*self._orders, *self._rounds.values()) for future in one.futures]
        for future in waiting:
            _set_error(future, message)
        await self._notify()

    def _check(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---------------------------------------------------------------- what the ranks call

    async def ready(self, run: str, rank: int, process: ShardProcess) -> None:
        """A rank has loaded its part of the model."""
        if run == self._run:
            self._processes[rank] = process
            await self._notify()

    async def work(self, run: str, rank: int, place: int) -> tuple[str, Any]:
        """What a rank does in the round at a place in the order; waits for it. ``("end", None)``: nothing any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: run != self._run or self._failure or self._has_round(place))
        if run != self._run or self._failure:
            return "end", None
        found = self._rounds[place]
        return found.kind, found.parts[rank] if rank < len(found.parts) else found.parts[0].placeholder()

    def _has_round(self, place: int) -> bool:
        """Whether there is one; it is made if there is something to do."""
        if place not in self._rounds:
            made = self._orders.popleft() if self._orders else self._round_of_rows()
            if made is None:
                return False
            self._rounds[place] = made
            if made.kind == "receive":
                self._version = -1  # until all ranks have all weights
        return True

    def _round_of_rows(self) -> _Round | None:
        """The next requests, one for each rank; those for other weights are answered with ``None``."""
        made = _Round("rows", [], [])
        while self._rows and len(made.parts) < self._sharding.num_ranks:
            rows, future = self._rows.popleft()
            if rows.version != self._version:
                future.set_result(None)
            else:
                made.parts.append(rows)
                made.futures.append(future)
        return made if made.parts else None

    async def finished(self, run: str, rank: int, place: int, value: Answer | None) -> None:
        """A rank has finished its part of a round."""
        if run != self._run or self._failure:
            return
        found = self._rounds[place]
        found.finished.add(rank)
        self._last_finished = time.monotonic()
        if found.kind == "rows" and rank < len(found.parts):
            assert value is not None
            # Ranks work at the same time, and the seconds of a replica are added up.
            found.futures[rank].set_result(value._replace(seconds=value.seconds / len(found.parts)))
        if len(found.finished) == self._sharding.num_ranks:
            del self._rounds[place]
            if found.kind == "receive":
                self._version = found.parts[0][1]
            if found.kind != "rows":
                found.futures[0].set_result(None)

    # ---------------------------------------------------------------- requests, those of a ModelReplica

    async def processes(self) -> list[ShardProcess]:
        """The ranks that have loaded the model."""
        return [self._processes[rank] for rank in sorted(self._processes)]

    async def idle_seconds(self) -> float:
        """Seconds since a rank has finished something, or this actor was started."""
        return time.monotonic() - self._last_finished

    async def version(self) -> int:
        """Version of the weights; 0 after a restart."""
        return self._version

    async def join(self, init_info: dict[str, Any]) -> None:
        """Have all ranks join the group of a sender, one after the other from ``rank_offset`` on."""
        offset, ranks = init_info["rank_offset"], self._sharding.num_ranks
        await self._order("join", [init_info | {"rank_offset": offset + rank} for rank in range(ranks)])

    async def receive(self, update_info: dict[str, Any], version: int) -> None:
        """Have all ranks receive all weights, of which each keeps its part."""
        await self._order("receive", [(update_info, version)] * self._sharding.num_ranks)

    async def _order(self, kind: str, parts: list[Any]) -> None:
        await self.load()
        future = asyncio.get_running_loop().create_future()
        self._orders.append(_Round(kind, parts, [future]))
        await self._notify()
        await future

    async def compute(self, rows: TokenRows) -> Answer | None:
        """Compute rows; ``None`` if the ranks have not the version of the weights."""
        self._check()
        self._start()
        future = asyncio.get_running_loop().create_future()
        self._rows.append((rows, future))
        await self._notify()
        found: Answer | None = await future
        return found


def _set_error(future: "asyncio.Future[Any]", message: str) -> None:
    if not future.done():
        future.set_exception(RuntimeError(message))
