"""Weights for running servers, through vLLM's own weight-transfer endpoints (``VLLM_SERVER_DEV_MODE=1``).

The steps are control messages over HTTP. The bytes take the way that they take to engines of :class:`VLLMPool`.
"""

import concurrent.futures
import contextlib
import itertools
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.server.connection import ServerConnections, ServerRefusal
from rlhfkit.rollout.weight_sync.sender import WeightSender
from rlhfkit.rollout.weight_sync.transfers import Transfer, make_sender, resolve_transfer
from rlhfkit.serving.access import is_loopback
from rlhfkit.serving.endpoints import Endpoint

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


class ServerReceivers:
    """Servers as a :class:`~rlhfkit.rollout.weight_sync.sender.Receivers`; ``timeout`` is in seconds for each step."""

    def __init__(self, connections: ServerConnections, workers: Sequence[int], timeout: float) -> None:
        self.connections = connections
        self.num_servers = len(workers)
        self._offsets = [0, *itertools.accumulate(workers)]
        self._timeout = timeout

    @property
    def num_workers(self) -> int:
        """Processes that hold weights, of all servers."""
        return self._offsets[-1]

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Numbers of these processes."""
        return tuple(range(self.num_workers))

    @property
    def address(self) -> str:
        """Address at which the servers reach this process: loopback if they are reached by it."""
        hosts = [urlsplit(url) for url in self.connections.options.urls]
        if all(is_loopback(host.hostname or "") for host in hosts):
            return "127.0.0.1"
        far = next(host for host in hosts if not is_loopback(host.hostname or ""))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing, but chooses an interface
            probe.connect((far.hostname, far.port or 80))
            return str(probe.getsockname()[0])

    def worker(self, rank: int) -> str:
        """Name the server whose worker has a rank from 1 on."""
        place = next(number for number, end in enumerate(self._offsets[1:]) if rank <= end)
        return self.connections.endpoints[place].url

    def call(self, path: str, *bodies: dict[str, Any] | None) -> PendingCalls:
        """Post to every server, each its own body if there are several."""
        endpoints = self.connections.endpoints
        each = bodies if len(bodies) > 1 else (bodies[0] if bodies else None,) * len(endpoints)
        started = [
            self.connections.submit(self.connections.call(endpoint, "POST", path, body, timeout=self._timeout))
            for endpoint, body in zip(endpoints, each, strict=True)
        ]
        return PendingCalls(started)

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> PendingCalls:
        """Have every worker prepare for transfers; if ``ranked``, the workers' ranks begin at 1."""
        offsets = [{"rank_offset": 1 + offset} if ranked else {} for offset in self._offsets[:-1]]
        return self.call("/init_weight_transfer_engine", *({"init_info": init_info | offset} for offset in offsets))

    def update(self, update_info: dict[str, Any]) -> PendingCalls:
        """Have every worker receive weights."""
        return self.call("/update_weights", {"update_info": update_info})


class ServerSync:
    """Rank 0's steps of a weight sync: pause, begin the update, send, finish it, resume.

    A server whose transfer broke off has weights of two versions and stays paused until the next sync.
    """

    def __init__(self, receivers: ServerReceivers, sender: WeightSender) -> None:
        self._receivers = receivers
        self._sender = sender
        self._connected = False
        self._sent: str | None = None  # version that the servers have of us
        self._broken = False

    def sync(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Send weights to all servers and label them; EngineError if one fails."""
        receivers = self._receivers
        try:
            # Requests of others are kept, and continue with the new weights; cached keys and values are dropped.
            receivers.call("/pause?mode=keep&clear_cache=true").result()
            if self._broken:
                with contextlib.suppress(EngineError):  # the update may have ended
                    receivers.call("/finish_weight_update", {}).result()
            # Servers that were started again, or got weights of others, have left the connection.
            if not self._connected or served_versions(receivers.connections) != [self._sent] * receivers.num_servers:
                self._sender.connect(receivers)
                self._connected = True
            receivers.call("/start_weight_update").result()
            self._broken = True
            self._sender.send(receivers, infos, weights)
            receivers.call("/finish_weight_update", {"weight_version": str(version)}).result()
            self._sent = str(version)
            receivers.call("/resume").result()
            self._broken = False
        except BaseException:
            self._connected = False
            with contextlib.suppress(Exception):
                self._sender.close()  # workers that wait for data fail now, not at their time limit
            raise

    def can_retry(self, error: BaseException) -> bool:
        """False: a server that failed is somebody else's to start again."""
        return False

    def close(self) -> None:
        """Disconnect from the workers."""
        self._sender.close()
        self._connected = False
