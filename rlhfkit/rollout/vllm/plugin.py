"""A weight-transfer engine named ``gloo`` for vLLM 0.32, beside its own ``nccl`` and ``ipc``; for CPUs.

It is registered by the entry point ``vllm.general_plugins``, which vLLM loads in each of its processes, and again when
workers import our ``worker_extension_cls``, which needs no installed metadata. Imported by vLLM's processes only.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed does not export their types
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.vllm.bucket_loader import BucketLoader
from rlhfkit.rollout.weight_sync.gloo import GlooGroup, address_towards
from rlhfkit.rollout.weight_sync.shared_memory import SharedBlocks
from rlhfkit.rollout.weight_sync.source import plan_buckets
from rlhfkit.rollout.weight_sync.transport import NetworkTransport, SharedMemoryTransport, Transport


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker connects to the trainer, sent by :class:`~rlhfkit.rollout.weight_sync.sender.GlooSender`."""

    address: str
    port: int
    prefix: str
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout: float
    shared_memory: str | None


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, types and shapes of the tensors that follow."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Worker side of the transfer; a bucket arrives while the previous one is loaded."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._transport: Transport | None = None
        self._bucket_bytes = 0
        self._packed: dict[nn.Module, Any] = {}
        self._loader = BucketLoader(model, device)

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group and leave any earlier one."""
        self.shutdown()
        limit = timedelta(seconds=init_info.timeout)
        store = TCPStore(init_info.address, init_info.port, is_master=False, timeout=limit)
        self._bucket_bytes = init_info.bucket_bytes
        if init_info.shared_memory is not None:
            blocks = SharedBlocks.open(init_info.shared_memory, init_info.bucket_bytes)
            workers = init_info.world_size - 1
            named = PrefixStore(init_info.prefix, store)
            self._transport = SharedMemoryTransport(named, blocks, workers, init_info.timeout)
            return
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        address = address_towards(init_info.address, init_info.port)
        group = GlooGroup(store, init_info.prefix, rank, init_info.world_size, init_info.timeout, address)
        self._transport = NetworkTransport(group)

    def start_weight_update(self) -> None:
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

    def finish_weight_update(self) -> None:
        """Complete layers with padding, attention layers, and tied output layers."""
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

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive and load all buckets."""
        if self._transport is None:
            raise RuntimeError("update_weights was called before init_weight_transfer_engine")
        infos = [
            WeightInfo(name, tuple(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        ]
        buckets = plan_buckets(infos, self._bucket_bytes)
        blocks = self._transport.receive_blocks([bucket.num_bytes for bucket in buckets])
        self._loader.begin(infos)
        for bucket, block in zip(buckets, blocks, strict=True):
            self._loader.load(bucket.views(block, infos), block)
        self._loader.finish()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


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
    """Register the backend ``"gloo"`` of ``weight_transfer_config`` in this process; a second call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class WorkerExtension:
    """Our ``worker_extension_cls``: a base class that vLLM adds to its workers, which therefore import this module."""

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


register()
