"""What is installed here, and what the machine is."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from typing import Any

import torch

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "lightning": "lightning",
    "peft": "peft",
    "triton": "triton",
    "flash_attn": "flash-attn",
    "datasets": "datasets",
    "jsonargparse": "jsonargparse",
    "deepspeed": "deepspeed",
    "ray": "ray",
    "vllm": "vllm",
    "trl": "trl",
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "liger_kernel": "liger-kernel",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Distributions by the module that they are imported as."""


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # something forbids it, or it is half-way imported
        return False


def missing(modules: Sequence[str]) -> list[str]:
    """Those that are not installed."""
    return [module for module in modules if not is_installed(module)]


def versions() -> dict[str, str | None]:
    """Version of each of :data:`PACKAGES`; ``None``: not installed."""
    found: dict[str, str | None] = {}
    for module, distribution in PACKAGES.items():
        found[module] = None
        if is_installed(module):
            found[module] = _version(distribution) or _version(f"{distribution}-cpu") or "of unknown version"
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(device: str) -> dict[str, Any]:
    """The machine and what is installed, as plain values; starts CUDA."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": versions(),
        "device": device,
        "cores": os.cpu_count(),
        "compiler": shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc"),
    }
    if device == "cuda":
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found |= {
            "gpus": [f"{one.name}, {one.total_memory / 2**30:.0f} GiB, {one.major}.{one.minor}" for one in devices],
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found
