"""``IPCSender``: weights for engines on the ranks' GPUs, by handles to GPU memory.

Each rank fills a buffer on its GPU, which the engine's worker there opens. The messages are those of vLLM 0.32's
``ipc`` engine in packed mode (``vllm/distributed/weight_transfer/ipc_engine.py``). Not run on a GPU yet.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.weight_sync.sender import Receivers, verified
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES


def split_into_chunks(infos: Sequence[WeightInfo], capacity: int) -> list[range]:
    """Split tensors into chunks of at most ``capacity`` bytes; a larger tensor is a chunk of its own."""
    cuts, filled = [0], 0
    for index, info in enumerate(infos):
        if filled and filled + info.num_bytes > capacity:
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

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._announced = False  # whether the other ranks know that this transfer takes place

    def connect(self, receivers: Receivers) -> None:
        """Announce the layout of the bytes."""
        receivers.connect({"packed": True}, ranked=False).result()

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send rank 0's part; EngineError on every rank if an engine fails. A collective with :meth:`contribute`."""
        self._announced = True
        gather_objects(True)
        self._transfer(infos, weights, receivers)

    def contribute(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send another rank's part; returns at once if there is no transfer. A collective with :meth:`send`."""
        if gather_objects(None)[0]:
            self._transfer(infos, weights, None)

    def end(self) -> None:
        """Tell the other ranks if there is no transfer; called on rank 0 after each attempt."""
        if not self._announced:
            gather_objects(False)
        self._announced = False

    def _transfer(
        self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], receivers: Receivers | None
    ) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.device("cuda", torch.cuda.current_device())
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        parts = split_into_chunks(infos, self.bucket_bytes)
        size = max(sum(infos[index].num_bytes for index in part) for part in parts)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        # One handle for all chunks: the worker opens it once and closes it when the update is finished.
        reduce: Any = reduce_tensor  # has no types
        handle = {uuid: reduce(buffer)[1]}
        handles = {name: one for rank in gather_objects(handle) for name, one in rank.items()}
        stream = verified(infos, weights)

        def fill(part: range) -> None:
            end = 0
            for _ in part:
                flat = next(stream)[1].detach().contiguous().view(-1).view(torch.uint8)
                buffer[end : end + flat.numel()].copy_(flat)
                end += flat.numel()
            torch.cuda.current_stream().synchronize()

        def announce(part: range) -> None:
            if receivers is not None:
                receivers.update(_announcement([infos[index] for index in part], handles)).result()

        for part in parts:
            run_on_all_ranks(partial(fill, part), error_type=EngineError)  # then every worker may read
            run_on_all_ranks(partial(announce, part), error_type=EngineError)  # then every worker has read
        run_on_all_ranks(lambda: next(stream, None), error_type=EngineError)

    def close(self) -> None:
        """Do nothing: nothing is held between transfers."""


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
