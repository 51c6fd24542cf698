"""``BucketLoader``: what a vLLM worker does with the tensors of a transfer, over gloo or NCCL."""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.vllm.adapter_slot import install_adapter
from rlhfkit.rollout.weight_sync.source import ADAPTER_PREFIX, ADAPTER_SETTINGS


class BucketLoader:
    """Loads the buckets of each transfer into a vLLM model, between the start and the finish of its reload."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model  # torch types attributes of modules as tensors
        self._settings: dict[str, Any] = {}
        self._matrices: dict[str, Tensor] = {}

    def begin(self, infos: Sequence[WeightInfo]) -> bool:
        """Begin a transfer of these tensors; returns whether weights are among them."""
        self._settings, self._matrices = {}, {}
        return not all(info.name.startswith(ADAPTER_PREFIX) for info in infos)

    def load(self, named: Sequence[tuple[str, Tensor]], block: Tensor) -> None:
        """Load the tensors of one bucket, which are views of ``block``; it is overwritten afterwards."""
        weights = [(name, tensor) for name, tensor in named if not name.startswith(ADAPTER_PREFIX)]
        for name, tensor in named:
            if name == ADAPTER_SETTINGS:
                self._settings = json.loads(bytes(tensor.tolist()))
            elif name.startswith(ADAPTER_PREFIX):
                self._matrices[name.removeprefix(ADAPTER_PREFIX)] = tensor.cpu().clone()  # vLLM scales them in place
        if weights:
            self._model.load_weights(weights)
        _copy_pending_tensors(self._model, block)

    def install_adapter(self) -> None:
        """Put the adapter of the last transfer into vLLM's slot, or an empty one; finishing an update empties it."""
        install_adapter(self._model, self._settings, self._matrices)


def _copy_pending_tensors(model: nn.Module, block: Tensor) -> None:
    """Copy the tensors that vLLM keeps until their layer is complete, as the block is about to be overwritten.

    A fused layer (query, key and value; gate and up) may span two buckets; layers with padding are completed last.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    first, last = block.data_ptr(), block.data_ptr() + block.numel()
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if isinstance(value, Tensor) and value.device == block.device and first <= value.data_ptr() < last:
                    arguments.arguments[name] = value.clone()
