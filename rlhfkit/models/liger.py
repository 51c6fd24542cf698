"""Liger's Triton kernels for RMSNorm, rotary embeddings and gated MLPs (Hsu et al., 2024, arXiv:2410.10989).

Its losses and its output layer are left out: log-probs and losses are computed from hidden states by
:mod:`rlhfkit.losses.fused_head`, for every module the same. The kernels need a GPU.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

_LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def require_liger_kernels(model_type: str) -> None:
    """Check that Liger's kernels can be used for a family of models, before one is loaded.

    Raises:
        ImportError: If there is no GPU, or the package is not installed.
        ValueError: If Liger has no kernels for this family.
    """
    missing = [] if torch.cuda.is_available() else ["there is no GPU"]
    missing += [] if find_spec("liger_kernel") else ["liger-kernel is not installed (pip install 'rlhfkit[liger]')"]
    if missing:
        raise ImportError(
            f"liger_kernels=True cannot be used: {', and '.join(missing)}. Without it the model computes the same with "
            "PyTorch's operators"
        )
    require_liger_family(model_type)


def require_liger_family(model_type: str) -> None:
    """Raise ValueError if the installed Liger has no kernels for this type of models, for which it does nothing."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    families = sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)
    if model_type not in families:
        raise ValueError(
            f"liger_kernels=True: Liger has no kernels for models of the type {model_type!r}, only for "
            f"{', '.join(families)}; leave it out"
        )


def use_liger_kernels(model: nn.Module) -> None:
    """Switch a model that Transformers has loaded to Liger's kernels, before adapters are added.

    Liger switches the RMSNorm layers and MLPs of the model, and replaces classes and functions in the modules of
    Transformers too. The classes are put back: models loaded afterwards are Transformers' own, such as the small
    ones on the CPU with which packing is tested. Rotary embeddings are a function of the family: on GPUs every model of
    it in this process then uses the kernel.
    """
    from transformers.integrations.liger import apply_liger_kernel

    names = {type(layer).__module__ for layer in model.modules()}
    sources = [sys.modules[name] for name in names if name.startswith("transformers.")]
    before = [(source, dict(vars(source))) for source in sources]
    apply_liger_kernel(model, _LEFT_OUT)  # what else it replaces is Liger's choice for the family
    for source, originals in before:
        for name, original in originals.items():
            replaced = getattr(source, name)
            if replaced is not original:
                keep = isinstance(original, type) or hasattr(original, _SWITCHED)
                setattr(source, name, original if keep else _on_gpus(replaced, original))


_SWITCHED = "rlhfkit_liger_kernel"
"""Attribute of a function that uses a kernel on GPUs."""


def _on_gpus(kernel: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that uses a kernel on GPUs."""

    @wraps(function)
    def chosen(first: Tensor, *others: Any, **options: Any) -> Any:
        return (kernel if first.is_cuda else function)(first, *others, **options)

    setattr(chosen, _SWITCHED, kernel)
    return chosen
