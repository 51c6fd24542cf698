"""``IPCSender``: weights between processes that share a GPU, by handles to its memory: nothing is copied off the GPU.

Every training rank fills a buffer on its own GPU, and each engine's worker opens the buffer that is on its own. What is
announced is what vLLM 0.32's ``ipc`` engine takes in packed mode (``vllm/distributed/weight_transfer/ipc_engine.py``).
Written against its source and not run yet: it needs a GPU.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.weight_sync.sender import Receivers, checked
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES


def chunks(infos: Sequence[WeightInfo], capacity: int) -> list[range]:
    """Which tensors travel together: as many as fit, each whole.

    Args:
        infos: All tensors, in order.
        capacity: Bytes; a larger tensor travels alone.
    """
    cuts, filled = [0], 0
    for index, info in enumerate(infos):
        if filled and filled + info.num_bytes > capacity:
            cuts.append(index)
            filled = 0
        filled += info.num_bytes
    return [range(first, end) for first, end in zip(cuts, [*cuts[1:], len(infos)], strict=True) if end > first]


class IPCSender:
    """Sends by CUDA IPC. Every rank takes part: rank 0 with :meth:`send`, the others with :meth:`contribute`.

    Args:
        bucket_bytes: Size of the buffer on each GPU; as large as the largest tensor if that is larger.
    """

    backend = "ipc"
    # vLLM 0.32 gives no way to clear a half-loaded layer from outside.
    recoverable = False

    def __init__(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._joined = False  # whether the other ranks know that this transfer takes place, or does not

    def connect(self, receivers: Receivers) -> None:
        """Tell the workers how the bytes are laid out; see :class:`.WeightSender`."""
        receivers.connect({"packed": True}, ranked=False).result()  # there is no group to have a rank in

    def send(self, receivers: Receivers, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Rank 0's part; see :class:`.WeightSender`.

        Raises:
            EngineError: If an engine fails; the other ranks raise as well.
        """
        self._joined = True
        gather_objects(True)
        self._transfer(infos, weights, receivers)

    def contribute(self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        """The part of every other rank; returns at once if there is no transfer."""
        if gather_objects(None)[0]:
            self._transfer(infos, weights, None)

    def end(self) -> None:
        """Rank 0, after each attempt: tells the other ranks if there was no transfer, as its preparation failed."""
        if not self._joined:
            gather_objects(False)
        self._joined = False

    def _transfer(
        self, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]], receivers: Receivers | None
    ) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        device = torch.device("cuda", torch.cuda.current_device())
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        parts = chunks(infos, self.bucket_bytes)
        size = max(sum(infos[index].num_bytes for index in part) for part in parts)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        # One export for all chunks: the worker opens it once and lets go of it when the update is finished.
        handle = {uuid: reduce_tensor(buffer)[1]}
        handles = {name: one for rank in gather_objects(handle) for name, one in rank.items()}
        stream = checked(infos, weights)

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
        """Nothing is held between transfers."""


def _announcement(infos: Sequence[WeightInfo], handles: dict[str, Any]) -> dict[str, Any]:
    """One chunk, as vLLM's ``IPCWeightTransferUpdateInfo`` takes it."""
    import base64
    import pickle

    return {
        "names": [info.name for info in infos],
        "dtype_names": [str(info.dtype).removeprefix("torch.") for info in infos],
        "shapes": [list(info.shape) for info in infos],
        "tensor_sizes": [info.num_bytes for info in infos],
        # As text, which passes from vLLM's front end to its workers whatever serializer is between them. It never
        # leaves the machine: engines and ranks share a GPU.
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
