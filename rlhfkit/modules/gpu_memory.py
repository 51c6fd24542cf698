"""Whether a module's weights fit into its GPU, found before they are loaded."""

import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from rlhfkit.gpus import gpu_is_taken, warn_if_cuda_is_missing, weights_do_not_fit
from rlhfkit.models.load import base_model_name, count_parameters


def require_gpu_memory(module: Any) -> None:
    """Raise RuntimeError if a ``PolicyModule``'s weights alone exceed this rank's GPU.

    Warns if other processes leave too little of it; and on a CPU, if the machine has GPUs that torch cannot use. Does
    nothing under strategies of which it is unknown how they divide weights. ``rlhfkit estimate`` counts what else is
    needed: gradients, states of the optimizer, activations, engines.
    """
    device = module.trainer.strategy.root_device
    if device.type == "cpu":
        if not isinstance(module.trainer.strategy, DeepSpeedStrategy):  # ours says so when it is made
            warn_if_cuda_is_missing()
        return
    if device.type != "cuda":
        return
    parts = weight_bytes(module)
    cuda: Any = torch.cuda  # has no types
    free, total = cuda.mem_get_info(device)
    check_parts(parts, str(cuda.get_device_properties(device).name), free, total)


def check_parts(parts: dict[str, float], gpu: str, free: int, total: int) -> None:
    """Raise or warn; see :func:`require_gpu_memory`."""
    cure = (
        "divide them over more GPUs (strategy='rlhf_zero3'), leave them in main memory "
        "(strategy='rlhf_zero3_offload'), or train adapters of 4-bit weights (lora=..., quantization='nf4')"
    )
    problem = weights_do_not_fit(parts, gpu, total, cure)
    if problem is not None:
        raise RuntimeError(problem)
    taken = gpu_is_taken(parts, gpu, free, total)
    if taken is not None:
        warnings.warn(taken, stacklevel=2)


def weight_bytes(module: Any) -> dict[str, float]:
    """Return bytes on this rank's GPU of a ``PolicyModule``'s policy and of its copy as reference; empty: unknown.

    A lower bound: critic, reward model and teacher, which other arguments name, come on top.
    """
    shards = weight_shards(module.trainer.strategy)
    if shards is None:
        return {}
    itemsize = 0.5 if module.loading.quantization == "nf4" else float(module.model_dtype.itemsize)
    try:
        count = count_parameters(module.model_config, trust_remote_code=module.trust_remote_code)
    except Exception:  # a model of another class, or code of its own that needs data: loading says what is wrong
        return {}
    parts = {"weights of the policy": count * itemsize / shards}
    # Of a policy with adapters the weights under them are the reference.
    if module.needs_reference and module.lora is None and base_model_name(module.model_name) == module.model_name:
        parts["weights of the reference"] = parts["weights of the policy"]
    return parts


def weight_shards(strategy: Any) -> int | None:
    """Return over how many GPUs a strategy divides weights; ``None``: unknown, or they are in main memory."""
    if isinstance(strategy, DeepSpeedStrategy):
        zero = (strategy.config or {}).get("zero_optimization") or {} if isinstance(strategy.config, dict) else {}
        if zero.get("stage") != 3:
            return 1
        return None if "offload_param" in zero else int(strategy.world_size)
    return 1 if isinstance(strategy, DDPStrategy | SingleDeviceStrategy) else None
