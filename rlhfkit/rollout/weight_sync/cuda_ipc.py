"""``IPCSender``: weights for engines on the ranks' GPUs, by handles to GPU memory.

Each rank fills a buffer on its GPU, which the engine's worker there opens. The messages are those of the ``ipc`` engine
of vLLM 0.32 and 0.33 in packed mode (``vllm/distributed/weight_transfer/ipc_engine.py``; its workers' part is the same
in both). Its readers have run on a CPU with memory that both processes map from a file; nothing has run on a GPU yet.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfkit.distributed import gather_objects, get_rank, run_on_all_ranks
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.weight_sync.sender import Receivers, verified
from rlhfkit.rollout.weight_sync.source import GPU_BUCKET_BYTES

_NO_TRANSFER: tuple[int, ...] = (-1,)
"""What rank 0 tells the others, in place of the ranks whose workers read, if it could not begin."""


def split_into_chunks(infos: Sequence[WeightInfo], capacity: int) -> list[range]:
    """Split tensors into chunks of at most ``capacity`` bytes; a larger tensor is a chunk of its own.

    vLLM reads the tensors of a chunk without gaps, and torch refuses a view whose first byte is no multiple of the
    type's size, so a tensor of a wider type begins a chunk where it would be out of line (float32 after 3 x int8).
    """
    cuts, filled = [0], 0
    for index, info in enumerate(infos):
        if filled and (filled + info.num_bytes > capacity or filled % info.dtype.itemsize):
            cuts.append(index)
            filled = 0
        filled += info.num_bytes
    return [range(first, end) for first, end in zip(cuts, [*cuts[1:], len(infos)], strict=True) if end > first]


class IPCSender:
    """Sends by CUDA IPC. Rank 0 calls :meth:`send` and the other ranks :meth:`contribute`.

    The buffer on each GPU has ``bucket_bytes``, or the size of the largest tensor if that is larger.
    """

    backend = "ipc"
    # vLLM 0.32 has no way to reset a partly loaded layer from outside.
    recoverable = False

    def __init__(self, *, bucket_bytes: int = GPU_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._announced = False  # whether the other ranks know that this transfer takes place

    def connect(self, receivers: Receivers) -> None:
        """Announce the layout of the bytes."""
        receivers.connect({"packed": True}, ranked=False).result()

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send rank 0's part; EngineError on every rank if an engine fails. A collective with :meth:`contribute`."""
        self._announced = True
        readers = gather_objects(receivers.worker_numbers)[0]
        self._transfer(infos, weights, readers, receivers)

    def contribute(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send another rank's part; returns at once if there is no transfer. A collective with :meth:`send`."""
        readers = gather_objects(_NO_TRANSFER)[0]
        if readers != _NO_TRANSFER:
            self._transfer(infos, weights, readers, None)

    def end(self) -> None:
        """Tell the other ranks if there is no transfer; called on rank 0 after each attempt."""
        if not self._announced:
            gather_objects(_NO_TRANSFER)
        self._announced = False

    def _transfer(
        self,
        infos: Sequence[WeightInfo],
        weights: Iterator[tuple[str, Tensor]],
        readers: Sequence[int],
        receivers: Receivers | None,
    ) -> None:
        """Fill this rank's buffer chunk by chunk; ``readers`` are the ranks whose GPU has a worker that will read."""
        parts = split_into_chunks(infos, self.bucket_bytes)
        size = max(sum(infos[index].num_bytes for index in part) for part in parts)
        # A buffer that is exported and that nobody opens is never freed: torch waits for its reader to close it.
        buffer, handle = self._export(size) if get_rank() in readers else (None, {})
        handles = {name: one for rank in gather_objects(handle) for name, one in rank.items()}
        stream = verified(infos, weights)

        def fill(part: range) -> None:
            end = 0
            for _ in part:
                tensor = next(stream)[1]
                if buffer is not None:
                    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                    buffer[end : end + flat.numel()].copy_(flat)
                    end += flat.numel()
            self._finish_writing()

        def announce(part: range) -> None:
            if receivers is not None:
                receivers.update(_announcement([infos[index] for index in part], handles)).result()

        for part in parts:
            run_on_all_ranks(partial(fill, part), error_type=EngineError)  # then every worker may read
            run_on_all_ranks(partial(announce, part), error_type=EngineError)  # then every worker has read
        run_on_all_ranks(lambda: next(stream, None), error_type=EngineError)

    def _export(self, size: int) -> tuple[Tensor, dict[str, Any]]:
        """Allocate (size,) uint8 on this rank's GPU; also returns the arguments to open it, by the GPU's UUID.

        One handle serves all chunks: the worker opens it once and closes it when the update is finished.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.device("cuda", torch.cuda.current_device())
        with without_expandable_segments():
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        reduce: Any = reduce_tensor  # has no types
        return buffer, {str(torch.cuda.get_device_properties(device).uuid): reduce(buffer)[1]}

    def _finish_writing(self) -> None:
        """Wait until the GPU has written the buffer."""
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Do nothing: nothing is held between transfers."""


@contextlib.contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Have torch's allocator take memory that other processes can open, and then go on as it was set.

    Expandable segments are opened through ``pidfd_getfd``, which containers refuse. While the option is off, the
    allocator of torch 2.13 gives away none of the segments that it has.
    """
    allocator: Any = torch._C  # the public function is deprecated in its favour
    settings = allocator._accelerator_getAllocatorSettings()
    if "expandable_segments:true" not in settings.lower().replace(" ", ""):
        yield
        return
    allocator._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        allocator._accelerator_setAllocatorSettings(settings)


def _announcement(infos: Sequence[WeightInfo], handles: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of vLLM's ``IPCWeightTransferUpdateInfo`` for one chunk."""
    import base64
    import pickle

    return {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
        "tensor_sizes": [info.num_bytes for info in infos],
        # Text passes any serializer between vLLM's front end and its workers. It never leaves the machine, as engines
        # and ranks share a GPU.
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


# ---------------------------------------------------------------- memory of this rank that engines on its GPU can take
#
# When each is called is part of the order in rlhfkit/callbacks/rollout/parts/shared_devices.py.


def free_cached_memory() -> None:
    """Give the driver the memory that torch keeps for later; nothing without a GPU.

    Engines that wake map physical memory, and find none that torch's cache still holds. Objects that
    refer to one another (tracebacks, modules) keep tensors until they are collected.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def release_exported_buffers() -> None:
    """Free buffers that were exported to engines and that these have closed; nothing without a GPU.

    torch keeps an exported block until its reader has closed it, and looks only when it exports again.
    """
    if torch.cuda.is_available():
        gc.collect()
        cuda: Any = torch.cuda  # has no types
        cuda.ipc_collect()
