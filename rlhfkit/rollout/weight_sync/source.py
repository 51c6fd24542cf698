"""``ModuleWeights``: the full weights of a module under any strategy, in order, a bucket at a time.

The module may be wrapped by DDP, ``torch.compile`` or a DeepSpeed engine, sharded by ZeRO-3, made of DTensors (FSDP2,
tensor parallel), have LoRA adapters, which are merged, or hold 4-bit weights. Both sides of a transfer derive the same
:func:`plan_buckets` from the same metadata, so a bucket is one block of bytes without a header.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhfkit.distributed import all_reduce, full_parameters, get_world_size, is_sharded, local_shard, tensor_part
from rlhfkit.models.forward import unwrap
from rlhfkit.models.lora import ADAPTER, adapter_settings, has_adapter
from rlhfkit.models.weights.files import TensorGroup, saved_layout
from rlhfkit.models.weights.merging import (
    MergedWeight,
    adapter_weights,
    merged_weights,
    persistent_buffers,
)
from rlhfkit.rollout.engine import WeightInfo, WeightSource

DEFAULT_BUCKET_BYTES = 64 * 2**20
"""64 MiB: large enough for the speed of the link, small enough to gather a ZeRO-3 bucket on any GPU."""
GPU_BUCKET_BYTES = 512 * 2**20
"""512 MiB between GPUs, where the calls for a bucket take longer than its bytes; vLLM's own transfers have 1 GB."""

_ALIGNMENT = 64  # bytes; keeps views of mixed types legal and copies aligned to cache lines


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors that are sent as one block of bytes."""

    first: int
    """Index of the first tensor in the metadata."""
    offsets: tuple[int, ...]
    """Where each tensor starts in the block, in bytes."""
    num_bytes: int
    """Size of the block."""

    def views(self, block: Tensor, infos: Sequence[WeightInfo]) -> list[tuple[str, Tensor]]:
        """Return names and tensors of a (num_bytes,) uint8 block, as views; ``infos`` are those of all tensors."""
        named = []
        for offset, info in zip(self.offsets, infos[self.first :], strict=False):
            named.append((info.name, block[offset : offset + info.num_bytes].view(info.dtype).view(info.shape)))
        return named


def plan_buckets(infos: Sequence[WeightInfo], capacity: int = DEFAULT_BUCKET_BYTES) -> list[Bucket]:
    """Split tensors into buckets of ``capacity`` bytes, in order; a larger tensor gets a bucket of its own."""
    buckets: list[Bucket] = []
    offsets: list[int] = []
    first = end = 0
    for index, info in enumerate(infos):
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if offsets and start + info.num_bytes > capacity:
            buckets.append(Bucket(first, tuple(offsets), end))
            first, start, offsets = index, 0, []
        offsets.append(start)
        end = start + info.num_bytes
    if offsets:
        buckets.append(Bucket(first, tuple(offsets), end))
    return buckets


class ModuleWeights(WeightSource):
    """The weights of a module, sharded or not.

    Iterating is a collective if the module is sharded: every rank iterates to the end. First all ranks check that every
    weight is finite, so that a diverged policy never reaches an engine.

    Example::

        engine.load(ModuleWeights(module.policy), version=trainer.global_step)

    Args:
        module: The policy, with or without wrappers.
        dtype: Type in which the weights are yielded; ``None``: their own.
        bucket_bytes: Bytes of a ZeRO-3 model that are gathered at a time.
        check_finite: Whether to check that weights are finite.

    Raises:
        ValueError: If the module has no parameters.
        NotImplementedError: If it has adapters that cannot be merged on the fly (others than LoRA and DoRA).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        check_finite: bool = True,
    ) -> None:
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes
        self.check_finite = check_finite
        self._module = module
        self._weights = self._weights_of(module)
        if not self._weights:
            raise ValueError(f"{type(module).__name__} has no parameters to send")

    def _weights_of(self, module: nn.Module) -> list[MergedWeight]:
        return merged_weights(module)

    def in_checkpoint_format(self) -> "WeightSource":
        """Return the weights as in saved files; a subclass that changes what is yielded overrides this as well."""
        from transformers import PreTrainedModel

        if not isinstance(unwrap(self._module), PreTrainedModel):
            return self
        saved = CheckpointWeights(
            self._module, dtype=self.dtype, bucket_bytes=self.bucket_bytes, check_finite=self.check_finite
        )
        return self if saved.metadata() == ModuleWeights.metadata(self) else saved

    def why_copied(self) -> str | None:
        """Why what is yielded is not the module's own memory; ``None`` if all of it is."""
        for weight in self._weights:
            parameter: Any = weight.parameter
            if weight.layer is not None:
                return "they are merged with a LoRA adapter"
            if is_sharded(parameter) or hasattr(parameter, "full_tensor"):
                return "they are sharded"
            if tensor_part(parameter) is not None:
                return "they are divided over ranks by tensor parallelism"
            if hasattr(parameter, "quant_state"):
                return "they have 4 bits"
            if self.dtype not in (None, parameter.dtype):
                return f"they are {parameter.dtype}, and the engine computes in {self.dtype}"
        return None

    def adapter_settings(self) -> dict[str, Any] | None:
        """Return rank, scale and targets of a LoRA adapter; ValueError with the reason if it has to be merged."""
        if not has_adapter(unwrap(self._module)):
            return None
        if type(self) is not ModuleWeights:
            raise ValueError(f"{type(self).__name__} may yield other weights than the policy's")
        adapter_weights(self._module)  # raises if more than the adapter is trained
        return adapter_settings(unwrap(self._module))

    def adapter_apart(self, *, with_base: bool) -> "AdapterApart":
        """Return the adapter's matrices, ``with_base`` after the weights under it, in checkpoint format."""
        base, adapter = (
            kind(self._module, dtype=self.dtype, bucket_bytes=self.bucket_bytes, check_finite=False)
            for kind in (BaseWeights, AdapterWeights)
        )
        return AdapterApart(base if with_base else None, adapter, self.adapter_settings() or {}, self.check_finite)

    def metadata(self) -> list[WeightInfo]:
        """Return name, full shape and type of each tensor, without gathering."""
        return [WeightInfo(weight.name, weight.shape, self.dtype or weight.dtype) for weight in self._weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor, valid until the next one.

        Before the first, all ranks raise ValueError if any weight is not finite.
        """
        if self.check_finite:
            self.raise_if_not_finite()
        for bucket in plan_buckets(self.metadata(), self.bucket_bytes):
            members = self._weights[bucket.first : bucket.first + len(bucket.offsets)]
            with full_parameters([part for weight in members for part in weight.parts]):
                for weight in members:
                    yield weight.name, weight.compute().to(self.dtype or weight.dtype)

    def raise_if_not_finite(self) -> None:
        """Check this rank's own shards; a collective: all ranks raise or none does."""
        of_parts = _are_finite([_own_part(part) for weight in self._weights for part in weight.parts])
        by_weight = torch.split(of_parts, [len(weight.parts) for weight in self._weights])
        finite = torch.stack([parts.all() for parts in by_weight]).to(torch.uint8)
        if get_world_size() > 1 and dist.get_backend() == "nccl":
            finite = finite.cuda()
        all_reduce(finite, "min")
        bad = [weight.name for weight, good in zip(self._weights, finite.tolist(), strict=True) if not good]
        if bad:
            raise ValueError(
                f"{len(bad)} of {len(finite)} weights are not finite (first: {bad[0]!r}), so nothing was sent: the"
                " policy has diverged; lower the learning rate, clip gradients, and resume from the last checkpoint"
            )


class CheckpointWeights(ModuleWeights):
    """The weights with the names, shapes and buffers of ``save_pretrained`` files, which engines expect.

    In these files each expert of a mixture is a tensor of its own; in models of Transformers 5 all experts share one.
    """

    def _weights_of(self, module: nn.Module) -> list[MergedWeight]:
        bare = unwrap(module)
        weights = [*self._parameters_of(bare), *persistent_buffers(bare)]
        self._groups = saved_layout(bare, [weight.name for weight in weights])
        self._by_name = {weight.name: weight for weight in weights}
        return weights

    def _parameters_of(self, module: nn.Module) -> list[MergedWeight]:
        return merged_weights(module)

    def in_checkpoint_format(self) -> "WeightSource":
        return self

    def _type(self, weight: MergedWeight) -> torch.dtype:
        """Return the type to send; buffers keep theirs: a router's correction is float32 in 16-bit models."""
        return self.dtype if self.dtype is not None and isinstance(weight.parameter, nn.Parameter) else weight.dtype

    def _members(self, group: TensorGroup) -> list[MergedWeight]:
        return [self._by_name[name] for name in group.members]

    def metadata(self) -> list[WeightInfo]:
        infos = []
        for group in self._groups:
            empty = [torch.empty(one.shape, dtype=self._type(one), device="meta") for one in self._members(group)]
            converted = group.convert(empty)
            infos += [WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in converted.items()]
        return infos

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self.check_finite:
            self.raise_if_not_finite()
        for groups in self._buckets():
            with full_parameters([part for group in groups for one in self._members(group) for part in one.parts]):
                for group in groups:
                    whole = [one.compute().to(self._type(one)) for one in self._members(group)]
                    yield from group.convert(whole).items()

    def _buckets(self) -> Iterator[list[TensorGroup]]:
        """Split the groups into buckets, each of which is gathered at once."""
        gathered: list[TensorGroup] = []
        size = 0
        for group in self._groups:
            own = sum(WeightInfo(one.name, one.shape, one.dtype).num_bytes for one in self._members(group))
            if gathered and size + own > self.bucket_bytes:
                yield gathered
                gathered, size = [], 0
            gathered.append(group)
            size += own
        if gathered:
            yield gathered


class BaseWeights(CheckpointWeights):
    """The weights under an adapter, as :class:`CheckpointWeights` of a model without one."""

    def _parameters_of(self, module: nn.Module) -> list[MergedWeight]:
        return [replace(weight, layer=None) for weight in merged_weights(module)]


class AdapterWeights(ModuleWeights):
    """The trained LoRA adapter only, under the model's own names; ValueError if there is none or more is trained."""

    def _weights_of(self, module: nn.Module) -> list[MergedWeight]:
        return adapter_weights(module)


ADAPTER_PREFIX = "rlhfkit.adapter."
"""Before the names of an adapter's tensors in a transfer, which otherwise are those of peft's files."""
ADAPTER_SETTINGS = ADAPTER_PREFIX + "settings"
"""First tensor of an adapter in a transfer: (bytes,) uint8, ``adapter_settings()`` as JSON."""


class AdapterApart(WeightSource):
    """The weights under an adapter (``None``: engines have them), its settings, and its matrices."""

    def __init__(
        self, base: ModuleWeights | None, adapter: ModuleWeights, settings: Mapping[str, Any], check_finite: bool
    ) -> None:
        self._base = base
        self._adapter = adapter
        self._check_finite = check_finite
        self._settings = torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)

    def metadata(self) -> list[WeightInfo]:
        settings = WeightInfo(ADAPTER_SETTINGS, tuple(self._settings.shape), torch.uint8)
        matrices = [replace(info, name=_adapter_name(info.name)) for info in self._adapter.metadata()]
        return [*(self._base.metadata() if self._base is not None else []), settings, *matrices]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full tensor; before the first, all ranks raise ValueError if any weight is not finite."""
        for part in (self._base, self._adapter) if self._check_finite else ():
            if part is not None:
                part.raise_if_not_finite()
        if self._base is not None:
            yield from self._base
        yield ADAPTER_SETTINGS, self._settings
        for name, tensor in self._adapter:
            yield _adapter_name(name), tensor


def _adapter_name(name: str) -> str:
    """``base_model.model.layers.0.q_proj.lora_A.weight`` of ``layers.0.q_proj.lora_A.default.weight``, with prefix."""
    return f"{ADAPTER_PREFIX}base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return (N,) bool on the CPU, whether each tensor is finite; the host waits once for each device.

    A sum, which shows any NaN or infinity, is ten times as fast as testing each element.
    """
    finite = torch.ones(len(tensors), dtype=torch.bool)
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        finite[places] = torch.stack([_finite_sum(tensors[place]) for place in places]).cpu()
    for place in (~finite).nonzero()[:, 0].tolist():
        finite[place] = torch.isfinite(tensors[place]).all()  # the sum of finite numbers may overflow
    return finite


def _finite_sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=None if tensor.dtype == torch.float64 else torch.float32).isfinite()


def _own_part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter without the padding of a ZeRO-3 shard, which is uninitialized memory."""
    if hasattr(parameter, "to_local"):
        return cast(Tensor, parameter.to_local().detach())
    if is_sharded(parameter) and parameter.numel() != parameter.ds_numel:
        return local_shard(parameter)
    return cast(Tensor, parameter.detach())
