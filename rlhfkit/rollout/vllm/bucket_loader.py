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
        self._incomplete: IncompleteLayers | None = None

    def begin(self, infos: Sequence[WeightInfo]) -> bool:
        """Begin a transfer of these tensors; returns whether weights are among them."""
        self._settings, self._matrices = {}, {}
        return not all(info.name.startswith(ADAPTER_PREFIX) for info in infos)

    def begin_reload(self) -> None:
        """Follow which layers wait for weights; called when vLLM has prepared the layers of the model."""
        self._incomplete = IncompleteLayers(self._model)

    def load(self, named: Sequence[tuple[str, Tensor]], block: Tensor | None) -> None:
        """Load the tensors of one bucket, which are views of ``block``.

        It is overwritten afterwards; with ``None`` the tensors stay as they are.
        """
        weights = [(name, tensor) for name, tensor in named if not name.startswith(ADAPTER_PREFIX)]
        for name, tensor in named:
            if name == ADAPTER_SETTINGS:
                self._settings = json.loads(bytes(tensor.tolist()))
            elif name.startswith(ADAPTER_PREFIX):
                self._matrices[name.removeprefix(ADAPTER_PREFIX)] = tensor.cpu().clone()  # vLLM scales them in place
        if weights:
            self._model.load_weights(weights)
        if self._incomplete is not None:
            self._incomplete.copy_views(block)

    def finish(self) -> None:
        """Forget the layers; RuntimeError if some were not followed, whose weights may have been overwritten."""
        incomplete, self._incomplete = self._incomplete, None
        if incomplete is not None:
            incomplete.check()

    def install_adapter(self) -> None:
        """Put the adapter of the last transfer into vLLM's slot, or an empty one; finishing an update empties it."""
        install_adapter(self._model, self._settings, self._matrices)


class IncompleteLayers:
    """Layers of a model of which vLLM keeps tensors until all have arrived: of two buckets, or with padding.

    Only layers that got a tensor with the last bucket are looked at: a model of 70B parameters has thousands of
    modules, and hundreds of buckets.
    """

    def __init__(self, model: nn.Module) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self._model = model
        self._arrived: list[tuple[_KeptTensors, Any]] = []
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights = _KeptTensors(info, self._arrived)

    def copy_views(self, block: Tensor | None) -> None:
        """Copy what is kept of the last bucket if it is a view of ``block``, which is about to be overwritten."""
        arrived = self._arrived[:]
        self._arrived.clear()
        if block is None:
            return
        first, last = block.data_ptr(), block.data_ptr() + block.numel()
        for kept, arguments in arrived:
            if kept.info.loaded_weights is not kept:  # the layer is complete
                continue
            for name, value in arguments.arguments.items():
                if isinstance(value, Tensor) and value.device == block.device and first <= value.data_ptr() < last:
                    arguments.arguments[name] = value.clone()

    def check(self) -> None:
        """Raise RuntimeError if vLLM keeps tensors in a list of its own, which was not seen."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for name, layer in self._model.named_modules():
            kept = get_layerwise_info(layer).loaded_weights
            if kept and not isinstance(kept, _KeptTensors):
                raise RuntimeError(
                    f"vLLM keeps weights of {name!r} ({type(layer).__name__}) where rlhfkit does not look for them, so "
                    "that they may have been overwritten: this version of vLLM is not supported"
                )


class _KeptTensors(list[Any]):
    """What vLLM keeps of a layer, in place of the list of its ``LayerReloadingInfo``, which a complete layer drops."""

    def __init__(self, info: Any, arrived: list[Any]) -> None:
        super().__init__()
        self.info = info
        self._arrived = arrived

    def append(self, entry: Any) -> None:
        """Keep the name of a parameter and the arguments of its loader."""
        super().append(entry)
        self._arrived.append((self, entry[1]))
