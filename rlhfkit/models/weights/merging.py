"""Weights as a model without adapters would have them: adapters merged, 4 bits dequantized, the model unchanged."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.distributed import full_shape
from rlhfkit.models.forward import VALUE_HEAD, unwrap
from rlhfkit.models.lora import adapter_layers

_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_BASE = ".base_layer"  # peft's name of the layer that an adapter wraps


@dataclass(frozen=True)
class MergedWeight:
    """One weight under its Hugging Face name, computed on demand."""

    name: str
    parameter: nn.Parameter
    """As in the model: a shard, 4 bits, or the weight itself."""
    layer: Any = None
    """The LoRA layer around it, if its adapter is to be merged."""

    @property
    def parts(self) -> list[nn.Parameter]:
        """Parameters that must be gathered for :meth:`compute`: the weight and its adapter's."""
        if self.layer is None:
            return [self.parameter]
        adapter = _active(self.layer)
        parts = [self.layer.lora_A[adapter], self.layer.lora_B[adapter]]
        parts += [self.layer.lora_magnitude_vector[adapter]] if _is_dora(self.layer, adapter) else []
        return [self.parameter, *(part.weight for part in parts)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        state = getattr(self.parameter, "quant_state", None)
        return full_shape(self.parameter) if state is None else tuple(state.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of :meth:`compute`."""
        state = getattr(self.parameter, "quant_state", None)
        dtype: torch.dtype = self.parameter.dtype if state is None else state.dtype
        return dtype

    def compute(self) -> Tensor:
        """The whole weight; a collective for a DTensor."""
        weight = _whole(self.parameter)
        if self.layer is None:
            return weight
        adapter = _active(self.layer)
        # Summed at least in float32 and rounded once, as close to the forward pass as the dtype allows.
        exact = torch.promote_types(weight.dtype, torch.float32)
        if _of_experts(self.layer):
            left, right, scale = self.layer.get_delta_factors(adapter)
            product = torch.baddbmm(weight.to(exact), left.to(exact), right.to(exact), alpha=scale)
            return product.detach().to(weight.dtype)
        merged = weight.to(exact) + self.layer.get_delta_weight(adapter).detach().to(exact)
        if _is_dora(self.layer, adapter):
            length = self.layer.lora_magnitude_vector[adapter].weight.detach().to(exact)
            rows = merged.T if self.layer.fan_in_fan_out else merged
            rows = rows * (length / torch.linalg.norm(rows, dim=1))[:, None]
            merged = rows.T if self.layer.fan_in_fan_out else rows
        return cast(Tensor, merged.to(weight.dtype))


def merged_weights(module: nn.Module) -> list[MergedWeight]:
    """All weights by Hugging Face name, tied ones once (loading ties them again), without a value head.

    Raises:
        NotImplementedError: If peft has trained anything else than LoRA or DoRA matrices of linear layers.
    """
    module = unwrap(module)
    layers = adapter_layers(module)
    found: list[MergedWeight] = []
    seen: set[int] = set()
    for name, parameter in module.named_parameters():  # yields each object once
        shard = getattr(parameter, "ds_id", None)
        if shard is not None and shard in seen:
            continue
        if shard is not None:
            seen.add(shard)
        owner, _, kind = name.rpartition(".")
        if name.startswith(f"{VALUE_HEAD}.") or (layers and _of_adapter(name)):
            continue
        layer = _layer_around(layers, owner, kind)
        found.append(MergedWeight(_plain_name(name, layers), parameter, layer))
    for one in found:
        _ = one.parts  # raises here for what cannot be merged, not during a transfer
    return found


def persistent_buffers(model: nn.Module) -> list[MergedWeight]:
    """Buffers that the model's files contain, by Hugging Face name, such as a router's trained correction."""
    layers = adapter_layers(model)
    return [
        MergedWeight(_plain_name(f"{owner}.{name}" if owner else name, layers), cast(nn.Parameter, buffer))
        for owner, inner in model.named_modules()
        for name, buffer in inner.named_buffers(recurse=False)
        if name not in inner._non_persistent_buffers_set and ".lora_" not in owner
    ]


def _plain_name(name: str, layers: Mapping[str, Any]) -> str:
    """Remove the parts of a name that wrappers and adapters add."""
    for wrapper in (*_WRAPPER_NAMES, "base_layer.") if layers else _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def adapter_weights(module: nn.Module) -> list[MergedWeight]:
    """The trained adapter's own weights under the model's names.

    Raises:
        ValueError: If there is none, or something else is trained too, which an adapter file cannot hold.
    """
    module = unwrap(module)
    trained = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not name.startswith(f"{VALUE_HEAD}.")
    ]
    others = [name for name, _ in trained if ".lora_" not in name]
    if not trained or others:
        reason = f"{others[0]!r} is trained beside it" if others else "there is none"
        raise ValueError(f"the adapter of {type(module).__name__} cannot be written alone: {reason}; write it merged")
    return [MergedWeight(name, parameter) for name, parameter in trained]


def _of_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    if "modules_to_save" in name or (".lora_" in name and name.endswith(".bias")) or "lora_embedding" in name:
        raise NotImplementedError(
            f"{name!r} is trained by peft but is no LoRA matrix of a linear layer, so it cannot be merged on the fly: "
            "leave out modules_to_save, lora_bias and embeddings"
        )
    return ".lora_" in name


def _layer_around(layers: Mapping[str, Any], owner: str, kind: str) -> Any:
    """The LoRA layer of a parameter; those of several tensors of one module (experts) are nested."""
    while owner.endswith(_BASE):
        owner = owner.removesuffix(_BASE)
        layer = layers.get(owner)
        if layer is not None and getattr(layer, "parameter_name", "weight") == kind:
            return layer
    return None


def _of_experts(layer: Any) -> bool:
    """Whether a LoRA layer belongs to a tensor with several weights."""
    return hasattr(layer, "parameter_name") and layer.num_experts > 1


def _active(layer: Any) -> str:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        raise NotImplementedError(f"exactly one adapter can be merged, {active} are active")
    return str(active[0])


def _is_dora(layer: Any, adapter: str) -> bool:
    variants = getattr(layer, "lora_variant", {})
    if adapter in variants and adapter not in layer.lora_magnitude_vector:
        raise NotImplementedError(
            f"adapters of type {type(variants[adapter]).__name__} cannot be merged on the fly; LoRA and DoRA can"
        )
    return adapter in layer.lora_magnitude_vector


def _whole(parameter: nn.Parameter) -> Tensor:
    if hasattr(parameter, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return cast(Tensor, dequantize_4bit(parameter.data, parameter.quant_state))
    whole: Tensor = cast(Any, parameter).full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()
