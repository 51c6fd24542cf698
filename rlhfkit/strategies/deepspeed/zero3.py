"""Build modules sharded (ZeRO 3), turn them back into ordinary ones, read and load their full weights."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from rlhfkit.distributed import full_parameters, is_sharded, tensor_part

log = logging.getLogger(__name__)


@contextmanager
def hugging_face_sharding(config: dict[str, Any] | None) -> Iterator[None]:
    """Make ``from_pretrained`` and ``from_config`` of Transformers build sharded models inside the context.

    Other layers built inside are sharded when their engine is created. ``config`` is a DeepSpeed configuration with
    ZeRO stage 3; ``None``: do nothing.
    """
    if config is None:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = None  # Transformers holds it by a weak reference
    try:
        keep_alive = HfDeepSpeedConfig(config)
    except ImportError as error:
        unset_hf_deepspeed_config()
        log.warning("every rank loads whole models, which engines shard later, as a package is missing: %s", error)
    try:
        yield
    finally:
        if keep_alive is not None:
            unset_hf_deepspeed_config()
        del keep_alive


def unshard(module: nn.Module) -> None:
    """Replace sharded parameters by ordinary ones with full values, on the CPU of every rank. A collective.

    For a child that was built or left sharded and is used without ZeRO 3. Tied parameters stay tied.
    """
    replaced: dict[int, nn.Parameter] = {}
    for submodule in module.modules():
        own = [p for p in submodule._parameters.values() if p is not None and is_sharded(p)]
        if not own:
            continue
        with full_parameters(own):
            for parameter in own:
                if tensor_part(parameter) is not None:
                    raise MisconfigurationException(
                        "an earlier run has divided these weights by ZeRO stage 3 and tensor parallelism: use stage 3 "
                        "again, or save them and build the module anew"
                    )
                if id(parameter) not in replaced:
                    full = parameter.detach().to("cpu", copy=True)
                    replaced[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
        # An engine has replaced this by a dictionary that gathers parameters on access.
        submodule.__dict__["_parameters"] = {
            name: replaced.get(id(parameter), parameter) for name, parameter in submodule._parameters.items()
        }


def full_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the full state dictionary of a module on the CPU, gathered one submodule at a time. A collective.

    It is empty on ranks without ``keep``, which only take part. Tied parameters share one tensor.
    """
    state: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return copies[id(tensor)]

    for prefix, submodule in module.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        with full_parameters(submodule.parameters(recurse=False)):
            if keep:
                for name, parameter in submodule.named_parameters(recurse=False):
                    state[prefix + name] = copy(parameter)
                for name, buffer in submodule.named_buffers(recurse=False):
                    if name not in submodule._non_persistent_buffers_set:
                        state[prefix + name] = copy(buffer)
    return state


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor], *, from_rank_zero: bool) -> None:
    """Copy full weights into the parameters and buffers of a module that ``state`` names, sharded or not. A collective.

    If ``from_rank_zero``, only the ``state`` of rank 0 is used, and the other ranks receive its values.
    """
    import torch.distributed as dist

    leader = not from_rank_zero or dist.get_rank() == 0
    for prefix, submodule in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        tensors = {**dict(submodule.named_parameters(recurse=False)), **dict(submodule.named_buffers(recurse=False))}
        with full_parameters(submodule.parameters(recurse=False), modifier_rank=0):
            for name, tensor in tensors.items():
                value = state.get(prefix + name)
                if leader and value is not None:
                    tensor.data.copy_(value)
                if from_rank_zero and not is_sharded(tensor) and tensor_part(tensor) is None:
                    dist.broadcast(tensor.data, src=0)
