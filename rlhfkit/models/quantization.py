"""Frozen weights in 4 bits, for training adapters on models that would not fit otherwise."""

from importlib.util import find_spec
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

Quantization = Literal["nf4"]
"""How frozen weights may be held: 4-bit NormalFloat."""


def quantization_config(quantization: Quantization, dtype: torch.dtype) -> Any:
    """Transformers' description of weights in 4 bits.

    Args:
        quantization: ``nf4``, with its scales quantized too (OpenRLHF's choice).
        dtype: Of the arithmetic.

    Raises:
        ValueError: If the name is unknown.
        ImportError: If bitsandbytes is not installed.
    """
    if quantization not in get_args(Quantization):
        raise ValueError(
            f"quantization must be one of {', '.join(get_args(Quantization))} or None, got {quantization!r}"
        )
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"quantization={quantization!r} needs bitsandbytes: pip install 'rlhfkit[qlora]'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_layout(model: nn.Module) -> None:
    """Let weights in 4 bits stay as they are in eval mode.

    bitsandbytes 0.50 rearranges them in place for inference on CPUs with AVX512-BF16, and does not undo it when the
    model is trained on: the backward pass then stops at the layer, and what is merged is no longer the weight.

    Args:
        model: Loaded with :func:`quantization_config`, or not quantized; changed in place.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            cast(Any, layer).support_avx512bf16_for_cpu = False
