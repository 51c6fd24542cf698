"""Divide the weights of a model over the ranks of a tensor group, with the layers of DeepSpeed's AutoTP.

Which layer is divided how is the model's own plan (``base_model_tp_plan`` of its Transformers configuration): layers by
columns, which give each rank some heads or some features of the MLP, then layers by rows, whose results are summed over
the group (Shoeybi et al. 2019, arXiv 1909.08053). Embedding and output layer are whole on every rank;
:mod:`rlhfkit.models.parallel.vocabulary` divides the work of the latter.

What cannot be divided exactly is refused when the run is set up.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from rlhfkit.distributed import TENSOR_PART, TensorPart, is_sharded, tensor_part
from rlhfkit.mesh import ForwardGroup, Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_COLUMN, _ROW, _SUMMED_GRADIENT = "colwise", "rowwise", "replicated_with_grad_allreduce"
_WHOLE = "embedding_rowwise"  # the embedding, which stays whole here
_INNER = {
    # What is divided of a layer with an adapter, W + scale B A: W, and one of A and B. The other is whole on each rank,
    # and has its whole gradient, as the divided one sums over ranks in its forward (A) or backward pass (B).
    _COLUMN: (r"\.base_layer", r"\.lora_B\.[^.]+"),
    _ROW: (r"\.base_layer", r"\.lora_A\.[^.]+"),
}
_ADAPTER_PART = re.compile(r"\.(base_layer|lora_[AB]\.[^.]+)$")


def plan_children(
    module: nn.Module, mesh: Mesh, group: ForwardGroup | None, device: torch.device
) -> dict[str, dict[str, Any]]:
    """The :func:`plan_of` each child of a LightningModule, before engines are made. A collective of all ranks.

    The ranks of a tensor group have the same weights then. Without tensor parallelism, there is no plan.
    """
    require_same_division(module, mesh.tensor)
    start_groups(mesh.tensor)
    plans = {}
    for name, child in module.named_children():
        if group is not None and mesh.tensor > 1 and next(child.parameters(), None) is not None:
            plans[name] = plan_of(name, child, mesh.tensor)
            make_equal(child, mesh, group.tensor, device)
    return plans


def plan_of(child_name: str, child: nn.Module, size: int) -> dict[str, Any]:
    """The ``tensor_parallel`` section of the DeepSpeed configuration of a child, made from its model's own plan.

    Args:
        child_name: Of the child in the LightningModule, for errors.
        child: A Hugging Face model, or a module with one inside, such as a ScalarModel.
        size: Ranks of a tensor group.

    Raises:
        MisconfigurationException: If the model has no plan, or one that cannot be used; it says what to do.
    """
    prefix, base, plan = _find_plan(child_name, child)
    refuse_unsupported(child_name, child)
    styles = _styles_by_layer(base, plan)
    unknown = sorted(set(plan.values()) - {_COLUMN, _ROW, _SUMMED_GRADIENT, _WHOLE})
    if _is_mixture(base):
        raise _refusal(
            child_name,
            f"{type(base).__name__} is a mixture of experts, which DeepSpeed's AutoTP (0.19.8) does not divide (styles "
            f"of its plan that it cannot convert: {unknown or 'none'})",
        )
    if unknown:
        raise _refusal(
            child_name, f"the plan of {type(base).__name__} has the styles {unknown}, which are not supported"
        )
    _check_heads(child_name, base, size)
    for layer, style in styles.items():
        _check_layer(child_name, base, layer, style, size)
    adapters = any("lora_" in name for name, _ in base.named_parameters())
    specs: list[dict[str, Any]] = [
        {
            "patterns": [
                f"^{_pattern_of(_joined_name(prefix, name))}{inner}\\.weight$"
                for inner in ("", *(_INNER[style] if adapters else ()))
            ],
            "partition_type": {_COLUMN: "column", _ROW: "row"}[style],
        }
        for name, style in plan.items()
        if style in (_COLUMN, _ROW)
    ]
    summed = [
        f"^{re.escape(_joined_name(prefix, layer))}\\.{name}$"
        for layer, style in styles.items()
        if style == _SUMMED_GRADIENT
        for name, parameter in base.get_submodule(layer).named_parameters()
        if parameter.requires_grad
    ]
    if summed:
        specs.append({"patterns": summed, "partition_type": "skip", "grad_allreduce": True})
    _check_complete(child_name, base, styles)
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def _joined_name(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _pattern_of(name: str) -> str:
    """The regular expression of a name in a plan, where ``*`` is the number of a layer."""
    return re.escape(name).replace(r"\*", r"\d+")


def _refusal(child_name: str, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"tensor_parallel_size cannot divide the weights of '{child_name}': {reason}. Use tensor_parallel_size=1: "
        "stage=3 divides weights over all ranks, and sequence_parallel_size divides long rows."
    )


def _find_plan(child_name: str, child: nn.Module) -> tuple[str, nn.Module, dict[str, str]]:
    """Name and module of the backbone with a plan inside a child, and the plan."""
    for name, module in child.named_modules():
        model: Any = module
        plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
        if plan and getattr(model, "base_model", None) is model:
            return name, module, dict(plan)
    raise _refusal(child_name, f"{type(child).__name__} has no base_model_tp_plan in its Transformers configuration")


def refuse_unsupported(child_name: str, child: nn.Module) -> None:
    """Raise MisconfigurationException for adapters and quantised weights."""
    for name, module in child.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and "lora_dropout" in name:
            raise _refusal(child_name, "its LoRA adapters have dropout, which would differ between ranks")
    for name, parameter in child.named_parameters():
        if "lora_magnitude_vector" in name or "modules_to_save" in name or "parametrizations" in name:
            raise _refusal(child_name, f"it has an adapter with the weight {name}; only LoRA's A and B can be divided")
        if hasattr(parameter, "quant_state") or not parameter.is_floating_point():
            raise _refusal(child_name, f"its weight {name} is quantised")


def _is_mixture(base: nn.Module) -> bool:
    config = cast(Any, base).config
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _styles_by_layer(base: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """The style of each module that the plan names, by its name inside the backbone."""
    patterns = [(re.compile(_pattern_of(name)), style) for name, style in plan.items()]
    return {name: style for name, _ in base.named_modules() for pattern, style in patterns if pattern.fullmatch(name)}


def _check_heads(child_name: str, base: nn.Module, size: int) -> None:
    config = cast(Any, base).config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or key_heads % size:
        raise _refusal(
            child_name,
            f"{type(base).__name__} has {heads} attention heads and {key_heads} key-value heads, which the size {size} "
            "does not divide",
        )


def _check_layer(child_name: str, base: nn.Module, layer: str, style: str, size: int) -> None:
    """Raise unless a layer is what its style needs: a plain linear layer whose features the size divides."""
    module = base.get_submodule(layer)
    if style in (_SUMMED_GRADIENT, _WHOLE):
        return
    module = getattr(module, "base_layer", module)  # inside an adapter of peft
    if type(module) is not nn.Linear and not _is_divided(module):
        raise _refusal(child_name, f"{layer} is a {type(module).__name__}, and only linear layers can be divided")
    if _is_divided(module):
        return
    linear = cast(nn.Linear, module)
    features = linear.out_features if style == _COLUMN else linear.in_features
    if features % size:
        raise _refusal(child_name, f"{layer} has {features} features to divide, which the size {size} does not divide")


def _is_divided(module: nn.Module) -> bool:
    return any(tensor_part(parameter) is not None for parameter in module.parameters(recurse=False))


def _check_complete(child_name: str, base: nn.Module, styles: dict[str, str]) -> None:
    """Raise if a weight beside divided layers (in an attention or MLP) is not in the plan.

    It would be applied to the heads or features of one rank, and its gradient would silently be of these only.
    """
    owners = {layer.rpartition(".")[0] for layer, style in styles.items() if style in (_COLUMN, _ROW)}
    for owner in sorted(owners):
        for name, _ in base.get_submodule(owner).named_parameters():
            inside = _ADAPTER_PART.sub("", name.rpartition(".")[0])
            if f"{owner}.{inside}" not in styles:
                raise _refusal(
                    child_name,
                    f"the plan of {type(base).__name__} does not say what becomes of {owner}.{name}, a weight beside "
                    "divided layers",
                )


# ---------------------------------------------------------------- dividing


@contextmanager
def adapters_open(child: nn.Module) -> Iterator[None]:
    """Inside, DeepSpeed's AutoTP finds the layers inside peft's; frozen weights stay frozen.

    deepspeed 0.19.8 takes a module with an attribute ``weight``, which peft's layers have as a property, for a layer:
    it replaces it without its adapter, or leaves it as it is. And it sets ``requires_grad`` of what it divides.
    """
    frozen = [parameter for parameter in child.parameters() if not parameter.requires_grad]
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    layer: Any = None if tuners is None else tuners.BaseTunerLayer
    kept = None if layer is None else layer.weight
    if layer is not None:
        del layer.weight
    try:
        yield
    finally:
        if layer is not None:
            layer.weight = kept
        for parameter in frozen:
            parameter.requires_grad_(False)


def start_groups(size: int) -> None:
    """Make DeepSpeed's process groups for engines that divide weights, those of ``Mesh.tensor_groups``. A collective.

    They belong to the process, and deepspeed 0.19.8 keeps those of an earlier run, whatever its size was.
    """
    from deepspeed.utils import groups

    groups.mpu = None
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = groups._DATA_PARALLEL_GROUP = None
    if size > 1:
        groups._init_tp_mesh_device(tensor_model_parallel_size=size)


def divide_plain_child(child: nn.Module, section: dict[str, Any], group: Any) -> None:
    """Divide a child without an engine, as an engine with the same section of its configuration would."""
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import set_autotp_mode

    if getattr(child, "ds_autotp_parsed", False):
        return
    # DeepSpeed's inference mode changes tensors in place, which frozen children need not.
    set_autotp_mode(training=True)
    size = section["autotp_size"]
    config = AutoTPConfig.from_dict({"tp_size": size, **section["partition_config"]})
    auto = AutoTP(
        module=child,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=config,
        model_config=getattr(child, "config", None),
        training_mode=True,
    )
    auto.set_tensor_parallel_config(size, group)
    auto.update_linear_policies()
    with adapters_open(child):
        auto._replace_module(child)
    cast(Any, child).ds_autotp_parsed = True
    mark_parts(child, group)


def require_known_norm(child_name: str, config: Mapping[str, Any]) -> None:
    """Raise MisconfigurationException for a trained child whose engine would clip by the norm of one rank's part."""
    narrow = any((config.get(kind) or {}).get("enabled") for kind in ("bf16", "fp16"))
    if "tensor_parallel" in config and narrow and config["zero_optimization"].get("stage", 0) == 0:
        raise MisconfigurationException(
            f"'{child_name}': with tensor_parallel_size > 1, DeepSpeed (0.19.8) computes a wrong gradient norm in bf16 "
            "and fp16 at ZeRO stage 0: use stage 1, 2 or 3"
        )


def mark_parts(child: nn.Module, group: Any) -> None:
    """Tell :func:`~rlhfkit.distributed.full_parameters` which parameters are divided, and how."""
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    for module in child.modules():
        if isinstance(module, LinearAllreduce):
            setattr(module.weight, TENSOR_PART, TensorPart(1, module._partition_sizes, group))
        elif isinstance(module, LinearLayer):
            for parameter in (module.weight, module.bias):
                if parameter is not None:
                    setattr(parameter, TENSOR_PART, TensorPart(0, module._partition_sizes, group))


def make_equal(child: nn.Module, mesh: Mesh, group: Any, device: torch.device) -> None:
    """Give a child the weights of its tensor group's first rank, before it is divided. A collective of the group.

    DeepSpeed sends weights only between the ranks that have the same part.
    """
    first = mesh.rank - mesh.tensor_rank
    for tensor in (*child.parameters(), *child.buffers()):
        if not is_sharded(tensor) and tensor_part(tensor) is None:
            value = tensor.data.to(device)  # one at a time: NCCL sends from GPUs only
            dist.broadcast(value, src=first, group=group)
            tensor.data.copy_(value)


def remove_first_batch_check(engine: "DeepSpeedEngine") -> None:
    """Remove the hook with which deepspeed 0.19.8 compares the first arguments of the ranks of a tensor group.

    It compares them by ``==``, which raises for our layouts on all ranks but the first, which then waits for ever.
    """
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


def require_same_division(module: nn.Module, size: int) -> None:
    """Raise MisconfigurationException if an earlier run has divided a child over another number of ranks."""
    for name, child in module.named_children():
        for parameter in child.parameters():
            part = tensor_part(parameter)
            if part is not None and len(part.sizes) != size:
                raise MisconfigurationException(
                    f"an earlier run has divided the weights of '{name}' over {len(part.sizes)} ranks, and this one "
                    f"has tensor_parallel_size={size}: save them and build the module anew"
                )
