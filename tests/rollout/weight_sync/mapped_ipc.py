"""The two ends of a transfer by handles to memory, on a CPU: our sender and vLLM's reader, with a file between them.

Stand-ins for CUDA only: the buffer is mapped from a file instead of exported, and opened by its path. Chunks, bytes and
messages are those of ``IPCSender``; parsing, unpacking and copying are vLLM's own code.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender

GPU = "GPU-0"


class MappedSender(IPCSender):
    """Sends through a file; ``handles`` are what it exported."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.path = path
        self.exported: list[int] = []

    def _export(self, size: int) -> tuple[Tensor, dict[str, Any]]:
        self.exported.append(size)
        self.path.write_bytes(bytes(size))
        buffer = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        # As torch's reduce_tensor: class, size, stride, offset, storage class, type, device, handle, bytes, and so on.
        head = (torch.Tensor, (size,), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0)
        return buffer, {GPU: (*head, str(self.path), size, 0, False, b"", 0, b"", False)}

    def _finish_writing(self) -> None:
        """A CPU has written when the copy returns."""


def open_mapped(*arguments: Any) -> Tensor:
    """In place of ``rebuild_cuda_tensor``."""
    return torch.from_file(arguments[7], shared=True, size=arguments[8], dtype=torch.uint8)


def read_with_vllm(reader: Any, method: str, message: dict[str, Any]) -> list[tuple[str, str, list[int], bytes]]:
    """Give a message to vLLM's engine for such transfers; returns name, type, shape and bytes of what it has loaded.

    ``reader`` is anything that keeps the engine between two messages. Runs where vLLM is.
    """
    import torch.multiprocessing.reductions
    from vllm.distributed.weight_transfer import ipc_engine

    loaded: list[tuple[str, str, list[int], bytes]] = []

    def load(weights: Any) -> None:
        for name, tensor in weights:
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            loaded.append((name, str(tensor.dtype), list(tensor.shape), raw))

    if method == "connect":
        engine: Any = object.__new__(ipc_engine.IPCWeightTransferEngine)
        engine.device, engine._packed_importer = torch.device("cpu"), ipc_engine.PackedBufferImporter()
        reader.ipc_engine = engine
        engine.init_transfer_engine(engine.parse_init_info(message))
        return []
    reader.ipc_engine.model = SimpleNamespace(load_weights=load)
    kept = torch.cuda.get_device_properties, torch.multiprocessing.reductions.rebuild_cuda_tensor, ipc_engine.envs
    try:
        torch.cuda.get_device_properties = lambda *_: SimpleNamespace(uuid=GPU)  # type: ignore[assignment, return-value]
        torch.multiprocessing.reductions.rebuild_cuda_tensor = open_mapped  # type: ignore[assignment]
        # As engine_environment() has it for this transfer; vLLM reads its variables once.
        ipc_engine.envs = SimpleNamespace(VLLM_ALLOW_INSECURE_SERIALIZATION=True)
        reader.ipc_engine.receive_weights(reader.ipc_engine.parse_update_info(message))
    finally:
        torch.cuda.get_device_properties, torch.multiprocessing.reductions.rebuild_cuda_tensor, ipc_engine.envs = kept
    return loaded
