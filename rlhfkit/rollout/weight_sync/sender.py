"""``WeightSender``, the trainer's side of a weight transfer, and ``GlooSender`` for CPUs.

Training rank 0 is rank 0 of a group with the engines' workers. One remote call announces names, types and shapes; the
bytes follow, bucket by bucket.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export their types

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.gloo import GlooGroup, open_store
from rlhfkit.rollout.weight_sync.shared_memory import INVISIBLE, SharedBlocks
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES, plan_buckets
from rlhfkit.rollout.weight_sync.transport import NetworkTransport, SharedMemoryTransport, Transport

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A remote call to several engines, in progress."""

    def poll(self) -> None:
        """Raise if an engine has failed already."""
        ...

    def result(self) -> list[Any]:
        """Wait for all engines; raises if one fails or the time is up."""
        ...


class Receivers(Protocol):
    """The engines, as a sender sees them."""

    @property
    def num_workers(self) -> int:
        """Number of receiving processes of all engines."""
        ...

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """Number of each receiving process among those of all engines, dead ones included; colocated: its rank."""
        ...

    @property
    def address(self) -> str:
        """Address at which they reach this process."""
        ...

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> Pending:
        """Have every worker prepare for transfers; if ``ranked``, each engine is also told its ``rank_offset``."""
        ...

    def update(self, update_info: dict[str, Any]) -> Pending:
        """Have every worker receive weights."""
        ...


class WeightSender(Protocol):
    """Sends the same weights to all engines."""

    backend: str
    """Name of vLLM's weight-transfer engine on the workers."""
    recoverable: bool
    """Whether engines can be sent weights again after a transfer broke off."""

    def connect(self, receivers: Receivers) -> None:
        """Connect to the workers."""
        ...

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send everything and wait until every worker has it."""
        ...

    def close(self) -> None:
        """Disconnect; workers that wait for data fail at once."""
        ...


def verified(infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; ValueError if one differs from its announced info, by which receivers split the bytes."""
    count = 0
    for count, (name, tensor) in enumerate(weights, start=1):
        if count > len(infos):
            raise ValueError(f"the weight source yields {name!r} after the {len(infos)} tensors that it announced")
        expected, actual = infos[count - 1], WeightInfo(name, tuple(tensor.shape), tensor.dtype)
        if actual != expected:
            raise ValueError(f"the weight source announced {expected} and yields {actual}")
        yield name, tensor
    if count != len(infos):
        raise ValueError(f"the weight source announced {len(infos)} tensors and yields {count}")


class GlooSender:
    """Sends buckets from the CPU: through shared memory if all engines are on this machine, else over TCP.

    ``timeout`` is in seconds, for one bucket or the rendezvous.
    """

    backend = "gloo"
    recoverable = True

    def __init__(self, *, timeout: float, bucket_bytes: int = DEFAULT_BUCKET_BYTES, shared_memory: bool = True) -> None:
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self.shared_memory = shared_memory
        self._store: TCPStore | None = None
        self._num_groups = 0  # formed so far; part of the prefix of their keys
        self._transport: Transport | None = None
        self._connected = False

    def connect(self, receivers: Receivers) -> None:
        """Form the group with the workers."""
        blocks = None
        if self.shared_memory and receivers.address == "127.0.0.1":
            blocks = SharedBlocks.create(self.bucket_bytes)
        try:
            self._connect(receivers, blocks)
        except RuntimeError as error:
            if INVISIBLE not in str(error):
                raise
            log.info("an engine of this machine does not see its shared memory: weights are sent over the network")
            self.shared_memory = False
            self._connect(receivers, None)
        finally:
            if blocks is not None:
                blocks.hide()

    def _connect(self, receivers: Receivers, blocks: SharedBlocks | None) -> None:
        self.close()
        if self._store is None:
            self._store = open_store(receivers.address, self.timeout)
        self._num_groups += 1
        prefix, size = f"weights{self._num_groups}", 1 + receivers.num_workers
        pending = receivers.connect(
            {
                "address": receivers.address,
                "port": self._store.port,
                "prefix": prefix,
                "world_size": size,
                "bucket_bytes": self.bucket_bytes,
                "timeout": self.timeout,
                "shared_memory": None if blocks is None else str(blocks.path),
            }
        )
        if blocks is None:
            group = GlooGroup(self._store, prefix, 0, size, self.timeout, receivers.address)
            self._transport = NetworkTransport(group)
        else:
            store = PrefixStore(prefix, self._store)
            self._transport = SharedMemoryTransport(store, blocks, receivers.num_workers, self.timeout)
        pending.result()
        self._connected = True

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights and wait until every worker has them."""
        if self._transport is None or not self._connected:
            raise RuntimeError("GlooSender.send was called before connect")
        pending = receivers.update(
            {
                "names": [info.name for info in infos],
                "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
                "shapes": [list(info.shape) for info in infos],
            }
        )
        stream = verified(infos, weights)
        buckets = plan_buckets(infos, self.bucket_bytes)
        try:
            blocks = self._transport.send_blocks([bucket.num_bytes for bucket in buckets], pending.poll)
            for number, block in enumerate(blocks):
                for _, view in buckets[number].views(block, infos):
                    view.copy_(next(stream)[1])
        except TimeoutError:
            pending.result()  # says which engine is late
            raise
        next(stream, None)  # ends the source, and raises if there is more than was announced
        pending.result()

    def close(self) -> None:
        """Leave the group; workers that wait for data fail at once."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._connected = None, False
