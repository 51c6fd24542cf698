"""The policy's LoRA adapter in vLLM: arguments of the engine, the request that uses it, and its place in a worker.

Written for vLLM 0.32. The tensors come with the weight transfer, so vLLM never looks for the adapter's files.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

NO_LORA = "does not support LoRA"
"""Part of our errors, and of vLLM's, about models and layers that take no adapter."""
_SLOT = 1  # vLLM's number of the only adapter
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes as max_lora_rank


def adapter_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``vllm.EngineArgs`` for an adapter with these settings.

    Raises:
        ValueError: If its rank is larger than any that vLLM takes.
    """
    rank = max([settings["r"], *settings["rank_pattern"].values()])
    if rank > _RANKS[-1]:
        raise ValueError(f"vLLM takes adapters up to rank {_RANKS[-1]}, and its rank is {rank}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(one for one in _RANKS if one >= rank),
        # Else vLLM computes with empty adapters of all other layers, the output layer included.
        "lora_target_modules": list(settings["target_modules"]),
    }


def adapter_request(arguments: Mapping[str, Any]) -> Any:
    """Return the ``LoRARequest`` of every request to an engine with these arguments; ``None``: it has no adapter."""
    if not arguments.get("enable_lora"):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", _SLOT, "sent-by-the-trainer")


def check_targets(model: nn.Module, targets: list[str]) -> None:
    """Raise RuntimeError for layers of which no vLLM layer takes an adapter; fused layers take those of their parts."""
    manager: Any = model.lora_manager
    kinds = {name.rpartition(".")[2] for name in manager.modules}
    parts = {part for kind in kinds for part in manager.packed_modules_mapping.get(kind, ())}
    missing = sorted(set(targets) - kinds - parts)
    if missing:
        raise RuntimeError(f"{type(model).__name__} of vLLM {NO_LORA} on {', '.join(missing)}")


def install_adapter(model: nn.Module, settings: Mapping[str, Any], matrices: Mapping[str, Tensor]) -> None:
    """Replace the adapter of a worker; without matrices by one that changes nothing.

    ``matrices`` have the names of peft's files and are changed in place.

    Raises:
        RuntimeError: If a matrix belongs to a layer that takes no adapter in vLLM.
    """
    from vllm.distributed import get_pp_group
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    if matrices:
        helper = PEFTHelper.from_dict({"target_modules": [], **settings})
        helper.validate_legal(manager.lora_config)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            _SLOT,
            dict(matrices),
            helper,
            device="cpu",  # as vLLM loads files; activate_adapter copies to the slot on the device
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
    else:
        # Of no layer of the model. vLLM 0.32 reads the first layer of an adapter, so it has one.
        nothing = LoRALayerWeights("nothing", 1, 1, torch.zeros(1, 1), torch.zeros(1, 1))
        adapter = LoRAModel(_SLOT, 1, {"nothing": nothing})
    manager.remove_adapter(_SLOT)
    manager.add_adapter(adapter)  # fuses the matrices of fused layers
    manager.activate_adapter(_SLOT)
    unused = sorted(set(adapter.loras) - set(manager.modules)) if matrices else []
    if unused and get_pp_group().world_size == 1:  # else they are those of other stages
        raise RuntimeError(f"{type(model).__name__} of vLLM {NO_LORA} on {unused[0]} ({len(unused)} layers)")
