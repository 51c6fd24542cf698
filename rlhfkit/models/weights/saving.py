"""Model folders with given weights, whatever the model in memory looks like (sharded, with adapters, in 4 bits)."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn


def save_weights(model: nn.Module, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write what ``from_pretrained`` of the model's class loads.

    Args:
        model: A Hugging Face model; gives class, configuration and persistent buffers (a router's trained correction),
            not weights, and stays as it is.
        folder: Made when missing.
        weights: Full weights by Hugging Face name; tied ones may be missing. Their type is written too.
    """
    original = cast(Any, model)
    config = copy.deepcopy(original.config)
    if hasattr(config, "quantization_config"):  # the weights are not in 4 bits
        del config.quantization_config
    with torch.device("meta"):
        empty: Any = type(original)(config)
    empty.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
    if original.can_generate():
        empty.generation_config = original.generation_config
    kept = set(empty.state_dict())
    buffers = {name: buffer.detach().cpu() for name, buffer in original.named_buffers() if name in kept}
    empty.save_pretrained(folder, state_dict={**buffers, **weights})
