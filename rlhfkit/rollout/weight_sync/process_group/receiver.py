"""``WeightReceiver``: a worker's side of a transfer, for any engine. It imports torch only, no vLLM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.process_group.rendezvous import Rendezvous, TrainerWatch, connect, report
from rlhfkit.rollout.weight_sync.process_group.transport import Transport
from rlhfkit.rollout.weight_sync.source import plan_buckets


@dataclass(kw_only=True)
class JoinInfo(Rendezvous):
    """What a :class:`~rlhfkit.rollout.weight_sync.sender.ProcessGroupSender` tells the workers of an engine."""

    rank_offset: int
    """Rank of the engine's first worker."""


class WeightReceiver:
    """Receives for one worker; ``device`` is where its weights are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._transport: Transport | None = None
        self._bucket_bytes = 0

    def join(self, invitation: JoinInfo, number: int) -> None:
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
