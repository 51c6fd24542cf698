"""GPU memory of this rank that colocated engines can take: what torch has cached, and buffers that engines have read.

When each is called is part of the order in :mod:`rlhfkit.callbacks.rollout.parts.shared_devices`.
"""

import gc
from typing import Any

import torch


def free_cached_memory() -> None:
    """Give the driver the memory that torch keeps for later; nothing without a GPU.

    Engines that wake map physical memory, and find none that torch's cache still holds. Objects that
    refer to one another (tracebacks, modules) keep tensors until they are collected.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def release_exported_buffers() -> None:
    """Free buffers that were exported to engines and that these have closed; nothing without a GPU.

    torch keeps an exported block until its reader has closed it, and looks only when it exports again.
    """
    if torch.cuda.is_available():
        gc.collect()
        cuda: Any = torch.cuda  # has no types
        cuda.ipc_collect()
