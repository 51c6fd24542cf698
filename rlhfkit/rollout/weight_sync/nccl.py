"""``NcclSender``: weights from GPU to GPU, through the trainer's side of vLLM 0.32's ``nccl`` transfer.

Imports vLLM in the training process, which takes about ten seconds once. Not run on GPUs yet.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.sender import Receivers
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES


class _CurrentWeights:
    """The weight source that vLLM's engine is given once; each transfer sets its own stream."""

    def __init__(self) -> None:
        self.infos: Sequence[WeightInfo] = ()
        self.weights: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> Sequence[WeightInfo]:
        """Return the infos; vLLM reads their name, dtype and shape."""
        return self.infos

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights


class _SyncClient:
    """vLLM's ``VLLMWeightSyncClient`` for our engines. :class:`WeightSyncCoordinator` begins and finishes updates."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._receivers.connect(init_info).result()

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        self._receivers.update(update_info).result()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


class NcclSender:
    """Broadcasts over NCCL in buckets of ``bucket_bytes``. NCCL refuses engines on the trainer's device."""

    backend = "nccl"
    # vLLM 0.32 has no way to reset a partly loaded layer from outside, and a broken NCCL group cannot be left.
    recoverable = False

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._weights = _CurrentWeights()
        self._engine: Any = None

    def connect(self, receivers: Receivers) -> None:
        """Form the group with the workers."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.close()
        with socket.create_server((receivers.address, 0)) as probe:  # vLLM opens the port itself
            port = probe.getsockname()[1]
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=receivers.address,
                master_port=port,
                world_size=1 + receivers.num_workers,
                packed_buffer_size_bytes=self.bucket_bytes,
                rank=0,
            ),
            client=_SyncClient(receivers),
            source=self._weights,
        )

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights; vLLM verifies the stream."""
        self._weights.infos, self._weights.weights = infos, weights
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
