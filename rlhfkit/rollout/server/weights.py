"""Weights for running servers, through vLLM's own weight-transfer endpoints (``VLLM_SERVER_DEV_MODE=1``).

The steps are control messages over HTTP. The bytes take the way that they take to engines of :class:`VLLMPool`.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.server.connection import ServerConnections, ServerRefusal
from rlhfkit.rollout.weight_sync.coordinator import SyncSteps, Transfer, make_sender, resolve_transfer
from rlhfkit.rollout.weight_sync.process_group.rendezvous import address_towards
from rlhfkit.rollout.weight_sync.sender import Receivers, WeightSender
from rlhfkit.serving.access import is_loopback
from rlhfkit.serving.client import Endpoint

HOW_TO_SERVE = (
    "to train with it, start it as: VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config "
    '\'{"backend": "rlhfkit"}\' --worker-extension-cls rlhfkit.rollout.vllm.plugin.WorkerExtension, where rlhfkit is '
    "installed. That opens endpoints that change the model to all who reach the server, which --api-key does not "
    "protect: in a trusted network only"
)

_CONTROL_SECONDS = 60.0
"""Limit of a request that only asks."""


class ServerInfo(NamedTuple):
    """What a server says of itself in development mode."""

    backend: str
    """Name of its weight-transfer engine."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    workers: int
    """Processes that hold weights."""


async def ask_server_info(connections: ServerConnections, endpoint: Endpoint) -> ServerInfo:
    """Ask a server what it takes weights by; EngineError, with what to do, if it takes none."""
    try:
        shown = await connections.call(endpoint, "GET", "/server_info?config_format=json", timeout=_CONTROL_SECONDS)
        world = await connections.call(endpoint, "GET", "/get_world_size", timeout=_CONTROL_SECONDS)
    except ServerRefusal as error:
        if error.status != 404:
            raise
        raise EngineError(f"{endpoint.url} only generates, its weights cannot be changed: {HOW_TO_SERVE}") from None
    config = shown["vllm_config"]
    backend = (config.get("weight_transfer_config") or {}).get("backend")
    if backend is None:
        raise EngineError(f"{endpoint.url} was started without --weight-transfer-config: {HOW_TO_SERVE}")
    device = str((config.get("device_config") or {}).get("device"))
    return ServerInfo(str(backend), "cpu" if device == "cpu" else "cuda", int(world["world_size"]))


def served_versions(connections: ServerConnections) -> list[str]:
    """Return the label of each server's weights; ``"default"`` before the first that was sent."""
    asked = [
        connections.submit(connections.call(endpoint, "GET", "/weight_info", timeout=_CONTROL_SECONDS))
        for endpoint in connections.endpoints
    ]
    return [str(future.result().get("weight_version")) for future in asked]


def choose_sender(
    infos: Sequence[ServerInfo], transfer: Transfer, *, trainer_has_gpu: bool, timeout: float, bucket_bytes: int | None
) -> WeightSender:
    """Return the sender for what all servers have; EngineError if they differ or have none that is known."""
    kinds = {(info.backend, info.device) for info in infos}
    if len(kinds) > 1:
        raise EngineError(f"the servers take weights in different ways, {sorted(kinds)}: start all alike")
    backend, device = kinds.pop()
    if backend != "rlhfkit":
        raise EngineError(
            f"servers with --weight-transfer-config backend {backend!r} are not supported; {HOW_TO_SERVE}"
        )
    both = "cuda" if device == "cuda" and trainer_has_gpu else "cpu"
    resolved = resolve_transfer(transfer, device=both, colocate=False)
    return make_sender(resolved, timeout=timeout, bucket_bytes=bucket_bytes)


class PendingCalls:
    """One call of every server, in flight; a :class:`~rlhfkit.rollout.weight_sync.sender.Pending`."""

    def __init__(self, futures: Sequence["concurrent.futures.Future[Any]"]) -> None:
        self._futures = list(futures)

    def poll(self) -> None:
        """Raise if a server has failed already."""
        for future in self._futures:
            if future.done():
                future.result()

    def result(self) -> list[Any]:
        """Wait for all servers; EngineError if one failed or did not answer in time."""
        concurrent.futures.wait(self._futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        self.poll()
        return [future.result() for future in self._futures]


_REQUESTS: dict[str, Callable[..., tuple[str, dict[str, Any] | None]]] = {
    # Requests of others are kept, and continue with the new weights; cached keys and values are dropped.
    "pause": lambda: ("/pause?mode=keep&clear_cache=true", None),
    "abandon_update": lambda: ("/finish_weight_update", {}),
    "connect": lambda init_info: ("/init_weight_transfer_engine", {"init_info": init_info}),
    "begin_update": lambda: ("/start_weight_update", None),
    "update": lambda update_info: ("/update_weights", {"update_info": update_info}),
    "finish_update": lambda version: ("/finish_weight_update", {"weight_version": str(version)}),
    "resume": lambda: ("/resume", None),
}
"""Path and body of what engines of a pool are called for, by the name of their method."""


class ServerReceivers(Receivers):
    """Servers that are sent weights; ``workers`` are the processes of each, ``timeout`` is in seconds for each step."""

    def __init__(self, connections: ServerConnections, workers: Sequence[int], timeout: float) -> None:
        super().__init__([one.url for one in connections.endpoints], workers, _address_for(connections.options.urls))
        self.connections = connections
        self._timeout = timeout

    def submit(
        self, method: str, *args: Any, doing: str, each: Sequence[tuple[Any, ...]] | None = None
    ) -> PendingCalls:
        started = []
        for place, endpoint in enumerate(self.connections.endpoints):
            path, body = _REQUESTS[method](*(args if each is None else each[place]))
            call = self.connections.call(endpoint, "POST", path, body, timeout=self._timeout)
            started.append(self.connections.submit(call))
        return PendingCalls(started)


def _address_for(urls: Sequence[str]) -> str:
    """Address at which servers reach this process: loopback if they are reached by it."""
    far = [parts for parts in map(urlsplit, urls) if not is_loopback(parts.hostname or "")]
    return address_towards(str(far[0].hostname), far[0].port or 80) if far else "127.0.0.1"


class ServerSync(SyncSteps):
    """Rank 0's steps of a weight sync of servers.

    A server whose transfer broke off has weights of two versions and stays paused until the next sync.
    """

    def __init__(self, receivers: ServerReceivers, sender: WeightSender) -> None:
        super().__init__(sender)
        self._receivers = receivers
        self._sent: str | None = None  # version that the servers have of us
        self._broken = False

    def sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Send weights to all servers and label them; EngineError if one fails."""
        receivers, before = self._receivers, self._broken
        # Servers that were started again, or got weights of others, have left the connection.
        if served_versions(receivers.connections) != [self._sent] * len(receivers.names):
            self._connected = None
        self._broken = True
        with self.paused(receivers, receivers, broken=before, resume=True):
            self._sender.send(receivers, infos, weights)
            receivers.submit("finish_update", version, doing="finishing the weight update").result()
            self._sent = str(version)
        self._broken = False

    def abandon(self, receivers: Receivers) -> None:
        """End an update that broke off, unless it has ended."""
        with contextlib.suppress(EngineError):
            super().abandon(receivers)
