"""A weight-transfer engine named ``rlhfkit`` for vLLM 0.32 and 0.33, beside their own ``nccl`` and ``ipc``.

It receives over gloo or NCCL, as the trainer's
:class:`~rlhfkit.rollout.weight_sync.process_group.transfer.ProcessGroupSender` says.

It is registered by the entry point ``vllm.general_plugins``, which vLLM loads in each of its processes, and again when
workers import our ``worker_extension_cls``, which needs no installed metadata. Imported by vLLM's processes only.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.vllm.adapter_slot import check_targets, install_adapter
from rlhfkit.rollout.vllm.machines import end_with_parent
from rlhfkit.rollout.weight_sync.process_group.rendezvous import Rendezvous
from rlhfkit.rollout.weight_sync.process_group.transfer import WeightReceiver
from rlhfkit.rollout.weight_sync.source import ADAPTER_PREFIX, ADAPTER_SETTINGS

NAME = "rlhfkit"
"""Name of the engine in ``weight_transfer_config``."""


@dataclass
class ProcessGroupInitInfo(Rendezvous, WeightTransferInitInfo):
    """How a worker joins the trainer's group."""


@dataclass
class ProcessGroupUpdateInfo(WeightTransferUpdateInfo):
    """Names, types and shapes of the tensors that follow."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class ProcessGroupTransferEngine(WeightTransferEngine[ProcessGroupInitInfo, ProcessGroupUpdateInfo]):
    """Worker side of the transfer; a bucket arrives while the previous one is loaded."""

    init_info_cls = ProcessGroupInitInfo
    update_info_cls = ProcessGroupUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver = WeightReceiver(device)
        self._packed: dict[nn.Module, Any] = {}
        self._loader = BucketLoader(model)
        self._reloading = False

    def install_adapter(self) -> None:
        """Put the adapter that came with the last update, or an empty one, into vLLM's slot."""
        self._loader.install_adapter()

    def init_transfer_engine(self, init_info: ProcessGroupInitInfo) -> None:
        """Join the trainer's group and leave any earlier one."""
        parallel = self.parallel_config
        with _trainers_nccl_settings():
            self._receiver.join(init_info, parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def start_weight_update(self) -> None:
        """Forget an update that broke off: layers are prepared once it is known that weights come, not an adapter."""
        self._reloading = False

    def _start_reload(self) -> None:
        """Prepare every layer to be loaded again, also after an update that broke off."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        # vLLM 0.32 skips layers that still wait for weights of an earlier update, and then counts the tensors of both:
        # a layer would be complete with half of each. Finalizing the old update first resets the counts.
        if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
            finalize_layerwise_reload(self.model, self.model_config)
        self._packed = {layer: layer.cpu_linear for layer in self.model.modules() if hasattr(layer, "cpu_linear")}
        if self.device.type == "cpu":
            _reset_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self._loader.begin_reload()
        self._reloading = True

    def finish_weight_update(self) -> None:
        """Complete layers with padding, attention layers, and tied output layers."""
        if not self._reloading:
            return
        self._reloading = False
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_layers(self._packed)
        self._packed = {}
        if self.device.type == "cpu":
            _check_expert_kernels(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load; unlike the base class, synchronize only if there is an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ProcessGroupUpdateInfo) -> None:
        """Receive and load all buckets."""
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        has_weights = self._loader.begin(infos)
        for tensors, block in self._receiver.receive(infos):
            if has_weights and not self._reloading:
                self._start_reload()
            self._loader.load(tensors, block)
            del tensors, block  # a large tensor is freed before the next one comes
        self._loader.finish()

    def shutdown(self) -> None:
        """Leave the group."""
        self._receiver.leave()


def _trainers_nccl_settings() -> contextlib.AbstractContextManager[None]:
    """Undo, as a context, what vLLM has set of NCCL's variables for itself (batch invariance), and the trainer has not.

    NCCL hangs when processes of one communicator have different settings.
    """
    try:
        from vllm.utils.nccl import unpinned_nccl_env  # vLLM 0.32 and 0.33
    except ImportError:
        return contextlib.nullcontext()
    return cast("contextlib.AbstractContextManager[None]", unpinned_nccl_env())


def _reset_expert_kernels(model: nn.Module) -> None:
    """Have the kernels of experts created again when their weights arrive.

    Workaround for vLLM 0.32 on CPU: experts are packed when their kernel is created. A later update would silently
    write unpacked weights where the kernel expects packed ones.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            cast(Any, method).moe_kernel = None


def _check_expert_kernels(model: nn.Module) -> None:
    """Raise if experts have no kernel because the model's loader bypasses vLLM's reloading (gpt-oss, 0.32)."""
    methods = {name: getattr(layer, "quant_method", None) for name, layer in model.named_modules()}
    without = [name for name, method in methods.items() if getattr(method, "moe_kernel", ...) is None]
    if without:
        raise RuntimeError(
            f"vLLM cannot load the experts of {type(model).__name__} anew ({without[0]} and {len(without) - 1} more "
            "kept none of the weights that were sent): sample with LocalEngine"
        )


def _repack_tied_layers(packed_before: dict[nn.Module, Any]) -> None:
    """Pack again each CPU layer whose packed copy the update did not replace.

    Workaround for vLLM 0.32 on CPU: linear layers compute with a oneDNN copy of their weight. An output layer tied to
    the embedding receives no weight in a reload, so its copy would silently stay that of the first weights.
    """
    if not packed_before:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer, before in packed_before.items():
        weight = getattr(layer, "weight", None)
        if layer.cpu_linear is before and weight is not None and weight.dim() == 2 and weight.numel() > 0:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def register() -> None:
    """Register the backend ``"rlhfkit"`` of ``weight_transfer_config`` in this process; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, ProcessGroupTransferEngine)
        end_with_parent()


class WorkerExtension:
    """Our ``worker_extension_cls``: a base class that vLLM adds to its workers, which therefore import this module."""

    weight_transfer_engine: ProcessGroupTransferEngine  # of vLLM's Worker

    def allocate_pipeline_buffers(self) -> None:
        """Allocate what later stages of a pipeline receive, where vLLM has not.

        Workaround for vLLM 0.32: it allocates them when it warms up, which it leaves out on CPUs with
        ``enforce_eager``, and the first request fails.
        """
        runner: Any = cast(Any, self).model_runner
        if runner.intermediate_tensors is None and hasattr(runner.model, "make_empty_intermediate_tensors"):
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def check_adapter(self, targets: list[str]) -> None:
        """Raise RuntimeError if the model takes no adapter on one of these layers; puts an empty one into the slot."""
        check_targets(self.weight_transfer_engine.model, targets)
        self.weight_transfer_engine.install_adapter()

    def install_adapter(self) -> None:
        """Fill vLLM's LoRA slot, which is emptied when an update is finished, with the adapter of that update."""
        self.weight_transfer_engine.install_adapter()


register()


# ---------------------------------------------------------------- loading buckets


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
