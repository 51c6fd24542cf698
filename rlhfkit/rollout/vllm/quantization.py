"""Engines that compute in 8 bits: ``VLLMPool(quantization=...)``. vLLM quantizes the weights of every sync.

Written for vLLM 0.32, whose layerwise reload quantizes each layer again once its new weights have arrived. Those that
need a checkpoint or calibration (AWQ, GPTQ, ...) cannot follow a policy and are refused.
"""

from typing import Any

import torch

_NAMES = {
    # One scale for each output channel and each token: close to the policy, and the one that vLLM's CPU build has.
    "fp8": "fp8_per_channel",
    "fp8_per_channel": "fp8_per_channel",
    "fp8_per_tensor": "fp8_per_tensor",
    "fp8_per_block": "fp8_per_block",
    "mxfp8": "mxfp8",
}
"""What we take, and vLLM's name of it."""


def check_quantization(quantization: str | None) -> None:
    """Raise ValueError for a quantization that vLLM does not apply to weights as they arrive."""
    if quantization is not None and quantization not in _NAMES:
        raise ValueError(
            f"VLLMPool(quantization=...) must be None or one of {', '.join(map(repr, _NAMES))}, which vLLM applies to "
            f"the weights of every sync, got {quantization!r}"
        )


def quantization_arguments(quantization: str | None, dtype: str | torch.dtype) -> dict[str, Any]:
    """Return arguments of ``vllm.EngineArgs``; ValueError if ``dtype``, in which engines compute, has 32 bits."""
    if quantization is None:
        return {}
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16"):
        raise ValueError(
            f"VLLMPool(quantization={quantization!r}) needs engines that compute in 16 bits, got {name}: set "
            "VLLMPool(dtype='bfloat16') or train in a precision like 'bf16-true'"
        )
    return {"quantization": _NAMES[quantization]}
