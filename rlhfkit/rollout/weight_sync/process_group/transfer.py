"""A transfer over gloo or NCCL: ``ProcessGroupSender`` is the trainer's side, ``WeightReceiver`` a worker's.

Training rank 0 is rank 0 of a group with the engines' workers. The receiver is for any engine: no vLLM is imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not export its type

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.weight_sync.process_group.groups import Backend
from rlhfkit.rollout.weight_sync.process_group.rendezvous import (
    Rendezvous,
    TrainerWatch,
    announce_leave,
    connect,
    gather_workers,
    open_store,
    report,
)
from rlhfkit.rollout.weight_sync.process_group.transport import Transport
from rlhfkit.rollout.weight_sync.sender import Receivers, verified
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES, Bucket, plan_buckets


class ProcessGroupSender:
    """Sends buckets in a process group: over gloo from the CPU, or over NCCL from the current GPU to the engines' GPUs.

    ``timeout`` is in seconds, for the rendezvous and for each bucket.
    """

    backend = "rlhfkit"
    recoverable = True

    def __init__(
        self,
        group_backend: Backend,
        *,
        timeout: float,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.group_backend = group_backend
        self.timeout = timeout
        self.bucket_bytes = bucket_bytes
        self._store: TCPStore | None = None
        self._num_groups = 0  # formed so far; part of the prefix of their keys
        self._prefix: str | None = None  # of the current group
        self._transport: Transport | None = None

    def connect(self, receivers: Receivers) -> None:
        """Form the group with the workers, after leaving any earlier one.

        Raises:
            EngineError: If a worker does not come, or the group does not connect, within ``timeout``; names the
                engines, the address and the port.
        """
        try:
            self._connect(receivers)
        except TimeoutError as error:
            raise EngineError(str(error)) from None

    def _connect(self, receivers: Receivers) -> None:
        self.close()
        if self._store is None:
            self._store = open_store(receivers.address, self.timeout)
        self._num_groups += 1
        self._prefix = f"weights{self._num_groups}"
        meeting = Rendezvous(
            receivers.address,
            self._store.port,
            self._prefix,
            1 + receivers.num_workers,
            self.timeout,
            self.group_backend,
            self.bucket_bytes,
        )
        pending = receivers.connect(asdict(meeting))
        gather_workers(self._store, meeting, pending.poll, receivers.worker)
        group = connect(self._store, meeting, 0, self._device(), pending.poll)
        transport = Transport(group, self.bucket_bytes, self.timeout)
        try:
            pending.result()
        except BaseException:
            transport.close()
            raise
        self._transport = transport

    def _device(self) -> torch.device:
        """Where this rank's blocks are."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if self.group_backend == "nccl" else torch.device("cpu")
        )

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights and wait until every worker has them; EngineError if a bucket takes too long."""
        if self._transport is None:
            raise RuntimeError("ProcessGroupSender.send was called before connect")
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
            for bucket in buckets:
                self._fill(blocks, bucket, infos, stream)
            next(blocks, None)  # sends the last one
        except TimeoutError as error:
            self.close()  # ends what hangs on both sides
            pending.result()  # says which engine is late
            raise EngineError(str(error)) from None
        next(stream, None)  # ends the source, and raises if there is more than was announced
        pending.result()

    def _fill(
        self,
        blocks: Iterator[Tensor],
        bucket: Bucket,
        infos: Sequence[WeightInfo],
        weights: Iterator[tuple[str, Tensor]],
    ) -> None:
        """Fill the blocks of one bucket: one, or a piece after the other if a tensor is larger than that."""
        if bucket.num_bytes <= self.bucket_bytes:
            for _, view in bucket.views(next(blocks), infos):
                view.copy_(next(weights)[1])
            return
        flat = next(weights)[1].detach().contiguous().view(-1).view(torch.uint8)
        for piece in torch.split(flat, self.bucket_bytes):
            next(blocks).copy_(piece)

    def close(self) -> None:
        """Leave the group; workers that wait for data fail at once."""
        transport, self._transport = self._transport, None
        prefix, self._prefix = self._prefix, None
        if self._store is not None and prefix is not None:
            announce_leave(self._store, prefix)
        if transport is not None:
            transport.close()


class WeightReceiver:
    """Receives for one worker; ``device`` is where its weights are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._transport: Transport | None = None
        self._bucket_bytes = 0

    def join(self, invitation: Rendezvous, number: int) -> None:
        """Join the trainer's group and leave any earlier one; ``number`` is that of this worker in its engine, from 0.

        Raises:
            RuntimeError: If the trainer or another worker cannot be reached.
            TimeoutError: If the group does not connect within the time limit.
        """
        self.leave()
        self._bucket_bytes = invitation.bucket_bytes
        rank = invitation.rank_offset + number
        store = report(invitation, rank)
        with TrainerWatch(store, invitation) as watch:
            group = connect(store, invitation, rank, self.device, watch.poll)
        self._transport = Transport(group, invitation.bucket_bytes, invitation.timeout, watch)

    def receive(self, infos: Sequence[WeightInfo]) -> Iterator[tuple[list[tuple[str, Tensor]], Tensor | None]]:
        """Yield the tensors of each bucket by name, and the block that they are views of, as they arrive.

        Both are valid until the next ones are requested. A tensor of more than ``bucket_bytes`` comes alone, with
        ``None`` for the block, and stays valid.
        """
        if self._transport is None:
            raise RuntimeError("weights cannot be received before the trainer's group was joined")
        buckets = plan_buckets(infos, self._bucket_bytes)
        blocks = self._transport.receive_blocks([bucket.num_bytes for bucket in buckets])
        for bucket in buckets:
            block = next(blocks)
            large = bucket.num_bytes > self._bucket_bytes
            yield bucket.views(block, infos), None if large else block
            del block  # a large one is freed before there is the next
        next(blocks, None)

    def leave(self) -> None:
        """Leave the group."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
