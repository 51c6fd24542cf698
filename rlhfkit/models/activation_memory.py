"""Less memory for activations of long rows: checkpoints in CPU memory, and MLPs computed in tiles of tokens.

Both are options of ALST (Bekman et al., 2025, arXiv 2506.13996). They change no result but for rounding.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_MLP_NAMES = ("MLP", "FeedForward", "FFN")


def use_gradient_checkpointing(model: nn.Module, *, offload: bool) -> None:
    """Recompute each layer of a Hugging Face model in the backward pass; only its input is kept.

    Args:
        model: A ``PreTrainedModel``; adapters may be in it already.
        offload: Keep these inputs in CPU memory, pinned for CUDA; copies run beside the computation, and the host waits
            for none. On a CPU they stay where they are.
    """
    hugging_face: Any = model
    hugging_face.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not offload:
        return
    for module in hugging_face.modules():
        inner = vars(module).get("_gradient_checkpointing_func")
        if inner is not None:
            module._gradient_checkpointing_func = partial(_with_offloaded_inputs, inner)


def _with_offloaded_inputs(checkpointed: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
    # torch's checkpoint saves its inputs outside of its own hooks, so that these are the hooks of the inputs only.
    with saved_tensors_hooks(_to_cpu, _to_device):
        return checkpointed(function, *inputs)


@cache
def _copy_stream(device: torch.device) -> Any:
    """The stream in which the inputs of a device leave and return, in order."""
    return torch.get_device_module(device).Stream(device)


def _to_cpu(tensor: Tensor) -> tuple[torch.device, Tensor]:
    device = tensor.device
    if device.type == "cpu":
        return device, tensor
    module, stream = torch.get_device_module(device), _copy_stream(device)
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=device.type == "cuda")
    stream.wait_stream(module.current_stream(device))  # until it has been computed
    with module.stream(stream):
        copied.copy_(tensor, non_blocking=True)
    _keep_until_done(tensor, stream)
    return device, copied


def _to_device(saved: tuple[torch.device, Tensor]) -> Tensor:
    device, copied = saved
    if device.type == "cpu":
        return copied
    module, stream = torch.get_device_module(device), _copy_stream(device)
    with module.stream(stream):  # after the copy to the CPU, for which nobody has waited
        tensor = copied.to(device, non_blocking=True)
    current = module.current_stream(device)
    current.wait_stream(stream)
    _keep_until_done(tensor, current)
    return tensor


def _keep_until_done(tensor: Tensor, stream: Any) -> None:
    """Tell torch's allocator that the memory of a tensor of another stream is in use until this one has come here."""
    if tensor.device.type == "cuda":
        tensor.record_stream(stream)


def use_tiled_mlp(model: nn.Module, tokens: int | None) -> None:
    """Compute the MLPs of a model in tiles of tokens, which are recomputed in the backward pass.

    The inner activations, of the MLP's intermediate size, then exist for one tile at a time. In a run without gradient
    checkpointing they are not kept until the backward pass either. The cost is one more forward pass of the MLPs. Under
    ZeRO 3 the weights of an MLP are gathered once for all its tiles.

    Args:
        model: A causal language model or classifier of Transformers.
        tokens: Tokens in a tile; ``None``: the model's hidden size (ALST's choice), with which the inner activations of
            a tile are as large as the MLP's weights.

    Raises:
        ValueError: If the model has no MLP that computes each token by itself: mixtures of experts have routers.
    """
    hugging_face: Any = model
    size = hugging_face.config.get_text_config().hidden_size if tokens is None else tokens
    found = [module for module in model.modules() if _is_mlp(module)]
    if not found:
        raise ValueError(
            f"tiled_mlp: {type(model).__name__} has no dense MLP that computes each token by itself; leave it out."
        )
    for mlp in found:
        # An instance attribute, so that hooks of the module (ZeRO 3's, which gather weights) run once for all tiles.
        mlp.forward = partial(_tiled, mlp, mlp.forward, size)
        mlp._z3_leaf = True  # type: ignore[assignment]  # DeepSpeed then has no hooks in the layers inside


def _tiled(mlp: nn.Module, forward: Callable[[Tensor], Tensor], size: int, hidden: Tensor) -> Tensor:
    """Apply the forward pass of an MLP to (..., H) hidden states, ``size`` tokens at a time."""
    rows = hidden.flatten(0, -2)
    if len(rows) <= size:
        return forward(hidden)
    dropout = mlp.training and any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in mlp.modules())
    tiles = []
    for tile in torch.split(rows, size):
        shaped = tile.view(*(1 for _ in hidden.shape[:-2]), *tile.shape)
        if torch.is_grad_enabled():
            tiles.append(checkpoint(forward, shaped, use_reentrant=False, preserve_rng_state=dropout))
        else:
            tiles.append(forward(shaped))
    return torch.cat(tiles, dim=-2).view(*hidden.shape[:-1], -1)


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module is a dense MLP: named like one, a function of one tensor, without a router inside."""
    if not type(module).__name__.endswith(_MLP_NAMES):
        return False
    inner = [type(child).__name__ for child in module.modules() if child is not module]
    routed = any("Router" in name or "Experts" in name or "Gate" in name for name in inner)
    return len(inspect.signature(type(module).forward).parameters) == 2 and not routed
