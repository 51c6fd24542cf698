"""``NativeSender``: weights from GPU to GPU through the trainer's side of vLLM's own ``nccl`` transfer, 0.32 or 0.33.

Imports vLLM in the training process, which takes about ten seconds once. It has no time limit inside a broadcast and
does not notice a dead engine there; ``ProcessGroupSender("nccl", ...)`` does. Not run on a GPU yet (docs/gpus.md).
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfkit.ray_session import unassigned_port
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.sender import Receivers
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES


@dataclass(frozen=True)
class _ParamMeta:
    """What vLLM reads of its ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: None = None
    """Ranks that have the tensor; ``None``: all. Since vLLM 0.33."""


class _Metadata(list[_ParamMeta]):
    """Metadata for both versions: vLLM 0.32 calls ``source.metadata()``, 0.33 reads ``source.metadata``."""

    def __call__(self) -> "_Metadata":
        return self


class CurrentWeights:
    """The ``WeightSource`` that vLLM's engine is given once; each transfer sets its own stream."""

    def __init__(self) -> None:
        self.metadata = _Metadata()
        self._weights: Iterator[tuple[str, Tensor]] = iter(())

    def set(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Set what the next transfer sends."""
        self.metadata = _Metadata(_ParamMeta(info.name, info.dtype, info.shape) for info in infos)
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; vLLM 0.32 iterates."""
        return self._weights

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; vLLM 0.33 calls this."""
        return self._weights

    def implements_iter_full(self) -> bool:
        """Whether there is ``iter_full``; asked by vLLM 0.33."""
        return True

    def implements_iter_local(self) -> bool:
        """Whether there is ``iter_local``, for sharded tensors, which are whole here; asked by vLLM 0.33."""
        return False

    def owned_names(self, rank: int) -> list[str]:
        """Names of the tensors that a rank has: all; asked by vLLM 0.33."""
        return [meta.name for meta in self.metadata]


class SyncClient:
    """vLLM's ``VLLMWeightSyncClient`` for our engines. :class:`WeightSyncCoordinator` begins and finishes updates."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join; each engine's ``rank_offset`` replaces the one that is given."""
        self._receivers.connect(init_info).result()

    def start_weight_update(self) -> None:
        """Do nothing; the coordinator has done it."""

    def update_weights(self, update_info: Any) -> None:
        """Have every worker receive weights."""
        self._receivers.update(update_info).result()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing; the coordinator does it."""


class NativeSender:
    """Broadcasts over NCCL in buckets of ``bucket_bytes``. NCCL refuses engines on the trainer's device."""

    backend = "nccl"
    # vLLM has no way to reset a partly loaded layer from outside, and a broken communicator of its cannot be left.
    recoverable = False

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._weights = CurrentWeights()
        self._engine: Any = None

    def connect(self, receivers: Receivers) -> None:
        """Form the group with the workers."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.close()
        self._weights.set((), iter(()))
        with _same_stream():
            self._engine = WeightTransferTrainerFactory.trainer_init(
                NCCLTrainerInitInfo(
                    master_address=receivers.address,
                    master_port=unassigned_port(receivers.address),  # vLLM listens there itself
                    world_size=1 + receivers.num_workers,
                    packed_buffer_size_bytes=self.bucket_bytes,
                    rank=0,
                ),
                client=SyncClient(receivers),
                source=self._weights,
            )

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all weights; vLLM verifies the stream."""
        self._weights.set(infos, weights)
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


@contextlib.contextmanager
def _same_stream() -> Iterator[None]:
    """Restore the current CUDA stream, which vLLM's NCCL communicator replaces for good when it is created.

    Training would go on in another stream than the default one, by which DeepSpeed's ZeRO-3 orders its overflow check.
    """
    stream: Any = torch.cuda.current_stream() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        if stream is not None:
            torch.cuda.set_stream(stream)
