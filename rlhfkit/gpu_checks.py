"""What is wrong with the GPUs of a run, found before anything expensive starts; each answer is one sentence, or none.

All functions but the first two take descriptions of GPUs, so that they say the same on any machine. Who
asks: the strategy when ranks have joined (:class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy`), modules before
they load a model, :class:`~rlhfkit.VLLMPool` before it starts engines.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfkit.gpus import (
    VARIABLE,
    DriverReport,
    VisibleGPU,
    ask_driver_about_all,
    device_files,
    visible_devices_problem,
)

GIB = 2**30
WARN_FROM = 0.9
"""The share of a GPU's memory from which an estimate is worth a warning: estimates are 10 to 15 % off."""
AMPERE = (8, 0)
"""The first compute capability with bfloat16 arithmetic (CUDA C++ Programming Guide, "Compute Capabilities")."""
ADA = (8, 9)
"""The first with 8-bit floating point arithmetic, of Ada."""
# CUresult of cuInit that a user can do something about (CUDA driver API, "Data types used by CUDA driver").
_DRIVER_ERRORS = {
    100: "the driver finds no GPU: the container was started without one, or all are hidden",
    802: "the GPUs are connected by NVSwitch, and NVIDIA's Fabric Manager is not running",
    803: "the kernel module and libcuda.so.1 are of different versions: restart the machine after a driver update",
    804: "the CUDA compatibility package (libcuda.so.1 of a container) does not support this GPU or its driver",
}


@dataclass(frozen=True)
class RankGPU:
    """The GPU of a training rank, as it tells the others."""

    rank: int
    host: str
    gpu: VisibleGPU

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


# ------------------------------------------------------------------------------------------------ no CUDA


def warn_if_cuda_is_missing() -> None:
    """Warn if this machine has NVIDIA GPUs that torch cannot use: Lightning would silently train on the CPU."""
    if not device_files():
        return
    import torch

    reason = why_cuda_is_missing(torch.version.cuda, torch.cuda.is_available(), os.environ.get(VARIABLE))
    if reason is not None:
        warnings.warn(reason, stacklevel=2)


def why_cuda_is_missing(built_for: str | None, available: bool, variable: str | None) -> str | None:
    """Say why torch cannot use this machine's NVIDIA GPUs; ``None`` if it can, or there are none.

    Args:
        built_for: ``torch.version.cuda``.
        available: ``torch.cuda.is_available()``.
        variable: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
    """
    files = device_files()
    return None if available or not files else explain_missing_cuda(built_for, files, variable, ask_driver_about_all())


def explain_missing_cuda(built_for: str | None, files: int, variable: str | None, driver: DriverReport) -> str:
    """Say why torch cannot use the GPUs of a machine that has ``files`` of them; see :func:`why_cuda_is_missing`."""
    here = f"This machine has {files} NVIDIA GPU(s), which torch cannot use"
    if built_for is None:
        return f"{here}: this torch was built without CUDA. Install one that was built for CUDA (pip install torch)"
    if driver.cuda is None:
        return (
            f"{here}: there is no driver library (libcuda.so.1). In a container, start it with its GPUs (docker run "
            "--gpus all); else install NVIDIA's driver"
        )
    if driver.cuda[0] < int(built_for.split(".")[0]):
        supported = ".".join(map(str, driver.cuda))
        return (
            f"{here}: torch was built for CUDA {built_for}, and the driver supports CUDA up to {supported}. Update "
            f"the driver, or install a torch that was built for CUDA {driver.cuda[0]}"
        )
    if driver.error:
        return f"{here}: {_DRIVER_ERRORS.get(driver.error, f'the driver answers with error {driver.error} of cuInit')}"
    odd = visible_devices_problem(variable, len(driver.gpus))
    return f"{here}: {odd or 'the driver sees them, but torch finds none: see python -m torch.utils.collect_env'}"


# ------------------------------------------------------------------------------------------------ ranks


def too_few_devices(local_rank: int, seen: int, variable: str | None, count: int) -> str:
    """Say that a machine has more ranks than GPUs that a rank sees.

    Args:
        local_rank: Number of the rank among those of its machine, at least ``seen``.
        seen: GPUs that it sees.
        variable: ``CUDA_VISIBLE_DEVICES``; ``None``: not set.
        count: GPUs of the machine.
    """
    odd = visible_devices_problem(variable, count)
    why = odd or (f"CUDA_VISIBLE_DEVICES={variable!r}" if variable is not None else f"the machine has {count}")
    return (
        f"A rank takes the GPU of its number (LOCAL_RANK), and rank {local_rank} of this machine sees {seen} GPU(s) "
        f"({why}): start fewer ranks (Trainer(devices=...), torchrun --nproc-per-node=...), show more GPUs, or have "
        "each rank see all of its machine's GPUs (srun --gpu-bind=none)"
    )


def same_gpu_twice(ranks: Sequence[RankGPU]) -> str | None:
    """Say which ranks are on one GPU, which NCCL refuses; ``None``: each has its own."""
    first: dict[str, RankGPU] = {}
    for one in ranks:
        other = first.setdefault(one.gpu.uuid or f"unknown of rank {one.rank}", one)
        if other is not one:
            return (
                f"{other} and {one} are on one GPU ({one.gpu.name}, GPU-{one.gpu.uuid}): give every rank a GPU of its "
                "own. Ranks that were started one by one each take the first GPU that they see, unless LOCAL_RANK "
                "numbers those of a machine"
            )
    return None


def unsupported_dtype(ranks: Sequence[RankGPU], dtype: str) -> str | None:
    """Say which GPUs cannot compute in a type (``bfloat16``, ``float8...``); ``None``: all can, or it is unknown."""
    needed = AMPERE if dtype == "bfloat16" else ADA if dtype.startswith("float8") else (0, 0)
    old = [one for one in ranks if (0, 0) < one.gpu.capability < needed]
    if not old:
        return None
    kinds = sorted({f"{one.gpu.name} (compute capability {_version(one.gpu.capability)})" for one in old})
    instead = "Trainer(precision='16-mixed') or '32-true'" if dtype == "bfloat16" else "another quantization"
    return (
        f"{_listed([str(one) for one in old])} of {len(ranks)} cannot compute in {dtype}, which needs compute "
        f"capability {_version(needed)}: {', '.join(kinds)}. Use {instead}, or other GPUs"
    )


def mixed_kinds(ranks: Sequence[RankGPU]) -> str | None:
    """Say that ranks have GPUs of several kinds, of which the slowest sets the pace; ``None``: of one."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for one in ranks:
        kinds.setdefault((one.gpu.name, round(one.gpu.memory / GIB)), []).append(str(one))
    if len(kinds) < 2:
        return None
    each = "; ".join(f"{name} ({gib} GiB): {_listed(who)}" for (name, gib), who in sorted(kinds.items()))
    return f"GPUs differ, and every step waits for the slowest and must fit into the smallest: {each}"


def mixed_engine_kinds(engines: Sequence[Sequence[str]], ranks: Sequence[str]) -> str | None:
    """Say that engines have GPUs of several kinds, or others than the ranks; ``None``: they do not, or it is unknown.

    Args:
        engines: Names of the GPUs of each engine.
        ranks: Name of the GPU of each rank.
    """
    kinds: dict[str, list[str]] = {}
    for number, names in enumerate(engines):
        for name in sorted(set(names)):
            kinds.setdefault(name, []).append(f"engine {number}")
    if len(kinds) > 1:
        each = "; ".join(f"{name}: {_listed(who)}" for name, who in sorted(kinds.items()))
        return f"engines have GPUs of several kinds, so some sample slower, and their log-probs differ more: {each}"
    others = sorted(set(ranks) - set(kinds) - {""})
    if kinds and others:
        return (
            f"engines have {', '.join(kinds)} and training ranks {', '.join(others)}: kernels differ, and with them "
            "log-probs of sampling and training (rollout_corr/logprob_abs_diff_mean)"
        )
    return None


# ------------------------------------------------------------------------------------------------ memory


def weights_do_not_fit(parts: Mapping[str, float], gpu: str, total: int, cure: str) -> str | None:
    """Say that weights alone exceed a GPU, so that the run cannot start; ``None``: they do not.

    Args:
        parts: Bytes by what they are, on one GPU.
        gpu: Its name.
        total: Its bytes, free ones and others.
        cure: What to do about it.
    """
    if sum(parts.values()) <= total:
        return None
    return f"{_amounts(parts)} do not fit into {gpu} ({total / GIB:.1f} GiB), before anything is computed: {cure}"


def gpu_is_taken(parts: Mapping[str, float], gpu: str, free: int, total: int) -> str | None:
    """Say that other processes leave too little of a GPU for the weights that it could hold; ``None``: they do not."""
    if not free < sum(parts.values()) <= total:
        return None
    return (
        f"{_amounts(parts)} need more than the {free / GIB:.1f} GiB that are free of {gpu} ({total / GIB:.1f} GiB): "
        "another process uses it (nvidia-smi lists them)"
    )


def memory_is_tight(parts: Mapping[str, float], gpu: str, available: float) -> str | None:
    """Say that an estimate comes near the memory of a GPU that nobody else uses, or above; ``None``: it is below 90 %.

    No error, as estimates are 10 to 15 % off.

    Args:
        parts: Bytes by what they are, in the phase that needs most.
        gpu: The GPU's name.
        available: Its free bytes.
    """
    share = sum(parts.values()) / available
    if share < WARN_FROM:
        return None
    verdict = "may not fit into" if share <= 2 - WARN_FROM else "will probably not fit into"
    return (
        f"The run {verdict} {gpu}: about {sum(parts.values()) / GIB:.1f} of {available / GIB:.1f} GiB that are free "
        f"({share:.0%}): {_amounts(parts)}. See rlhfkit estimate"
    )


def _amounts(parts: Mapping[str, float]) -> str:
    largest = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f} GiB" for size, name in largest)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
