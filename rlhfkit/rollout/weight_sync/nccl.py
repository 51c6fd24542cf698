"""``NcclSender``: weights from GPU to GPU, through vLLM's own trainer half of its ``nccl`` transfer.

Written against vLLM 0.32's source and not run yet: it needs at least two GPUs. It imports vLLM in the training process
(about ten seconds, once), which the gloo transfer avoids.
"""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.sender import Receivers
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES


class _Announced:
    """What vLLM's engine is given as its weight source, once; each transfer puts its own stream in."""

    def __init__(self) -> None:
        self.infos: Sequence[WeightInfo] = ()
        self.weights: Iterator[tuple[str, Tensor]] = iter(())

    def metadata(self) -> Sequence[WeightInfo]:
        """Name, dtype and shape are what vLLM reads, which :class:`WeightInfo` has."""
        return self.infos

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights


class _ControlPlane:
    """vLLM's ``VLLMWeightSyncClient`` over our engines. Beginning and finishing an update is the pool's business."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._receivers.connect(init_info).result()

    def start_weight_update(self) -> None:
        """The pool has paused the engines and begun the update."""

    def update_weights(self, update_info: Any) -> None:
        self._receivers.update(update_info).result()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The pool finishes the update, with its version."""


class NcclSender:
    """Broadcasts over NCCL. The trainer's device must not be one that an engine uses: NCCL refuses that.

    Args:
        bucket_bytes: Size of a bucket.
    """

    backend = "nccl"
    # vLLM 0.32 gives no way to clear a half-loaded layer from outside, and a broken NCCL group cannot be left.
    recoverable = False

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._announced = _Announced()
        self._engine: Any = None

    def connect(self, receivers: Receivers) -> None:
        """Form the group; see :class:`~rlhfkit.rollout.weight_sync.sender.WeightSender`."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.close()
        with socket.create_server((receivers.address, 0)) as probe:  # vLLM wants a port that it can open itself
            port = probe.getsockname()[1]
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=receivers.address,
                master_port=port,
                world_size=1 + receivers.num_workers,
                packed_buffer_size_bytes=self.bucket_bytes,
                rank=0,
            ),
            client=_ControlPlane(receivers),
            source=self._announced,
        )

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send; see :class:`~rlhfkit.rollout.weight_sync.sender.WeightSender`. vLLM checks the stream itself."""
        self._announced.infos, self._announced.weights = infos, weights
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
