"""The NVIDIA GPUs that a process sees: what ``CUDA_VISIBLE_DEVICES`` names, and what the driver says of each.

The driver is asked in a short process of its own, so this process neither initializes CUDA nor imports torch; the
answer is what torch would see: in CUDA's order, with the UUIDs of MIG instances. What is wrong with the GPUs of a run
is found before anything expensive starts; each answer is one sentence, or none. Imports the standard library only.
"""

import glob
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class VisibleGPU:
    """A GPU, or a MIG instance of one, as the driver describes it."""

    uuid: str
    """As in ``torch.cuda.get_device_properties(...).uuid``, without ``GPU-`` or ``MIG-``."""
    name: str = ""
    """Such as ``NVIDIA H100 80GB HBM3``."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability: (7, x) Volta and Turing, (8, x) Ampere and Ada, (9, 0) Hopper, (10, x) and more Blackwell."""
    memory: int = 0
    """Bytes."""


@dataclass(frozen=True)
class DriverReport:
    """What the driver answers; see :func:`ask_driver`."""

    gpus: tuple[VisibleGPU, ...] = ()
    """Those that a process with this environment sees, in CUDA's order."""
    cuda: tuple[int, int] | None = None
    """Newest CUDA that the driver supports; ``None``: there is no ``libcuda.so.1``."""
    error: int | None = None
    """``CUresult`` of an initialization that failed."""


# --------------------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES


def visible_names(value: str | None, count: int) -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` names, in CUDA's order, of the ``count`` GPUs of a machine.

    As CUDA reads it (CUDA C++ Programming Guide, "CUDA Environment Variables"): entries after the first that is no GPU
    are ignored, and one that is repeated hides all. UUIDs are taken for valid. ``None`` is an unset variable.
    """
    if value is None:
        return [str(index) for index in range(count)]
    names: dict[int | str, str] = {}
    entries = [part.strip() for part in value.split(",")]
    for entry in entries:
        gpu = _gpu_of(entry)
        if gpu is None or _kind(gpu) != _kind(_gpu_of(entries[0])) or (isinstance(gpu, int) and gpu >= count):
            break
        if gpu in names:
            return []
        names[gpu] = entry
    return list(names.values())


def _kind(gpu: int | str | None) -> str:
    """``GPU-``, ``MIG-``, or nothing for a number: CUDA wants entries of one kind."""
    return gpu[:4] if isinstance(gpu, str) else ""


def _gpu_of(entry: str) -> int | str | None:
    """Return the number or UUID of an entry; CUDA ignores what follows the digits of a number."""
    if entry.startswith(("GPU-", "MIG-")):
        return entry
    digits = re.match(r"\+?(\d+)", entry)
    return None if digits is None else int(digits[1])


def visible_devices_problem(value: str | None, count: int) -> str | None:
    """Say what is odd about ``CUDA_VISIBLE_DEVICES`` on a machine with ``count`` GPUs; ``None``: nothing."""
    if value is None:
        return None
    entries = [part.strip() for part in value.split(",")]
    names = visible_names(value, count)
    shown = f"{VARIABLE}={value!r}"
    if entries == [""] or entries[0] == "-1":
        return f"{shown} hides all {count} GPU(s) of this machine"
    if not names and _gpu_of(entries[0]) is not None and len(set(map(_gpu_of, entries))) < len(entries):
        twice = next(entry for entry in entries if list(map(_gpu_of, entries)).count(_gpu_of(entry)) > 1)
        return f"{shown} names {twice} twice, for which CUDA hides all GPUs"
    if len(names) < len(entries):
        wrong = entries[len(names)]
        return (
            f"{shown}: {wrong!r} is none of this machine's {count} GPU(s) (numbers from 0, or UUIDs that begin with "
            f"GPU- or MIG-), so CUDA shows the {len(names)} before it only"
        )
    return None


def uuid_of_name(name: str | None) -> str | None:
    """Return the UUID that an entry of ``CUDA_VISIBLE_DEVICES`` consists of; ``None`` for a number or a beginning."""
    uuid = (name or "").removeprefix("GPU-").removeprefix("MIG-").lower()
    return uuid if uuid != (name or "").lower() and len(uuid) == 36 else None


def name_of_uuid(uuid: str, gpu: str = "") -> str:
    """Return the entry of ``CUDA_VISIBLE_DEVICES`` for a UUID; ``gpu`` is the device's name, which says MIG for one."""
    return f"{'MIG' if ' MIG ' in gpu else 'GPU'}-{uuid}"


# --------------------------------------------------------------------------------------- the driver

# CUDA driver API: attributes 75 and 76 are the compute capability. Version 2 of cuDeviceGetUuid has the UUIDs of MIG
# instances, the first those of their GPUs.
_QUESTION = """
import ctypes, json, uuid
answer = {"cuda": None, "error": None, "gpus": []}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(json.dumps(answer))
    raise SystemExit
version, count = ctypes.c_int(), ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
answer["cuda"] = [version.value // 1000, version.value % 1000 // 10]
answer["error"] = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or None
get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
for index in range(count.value):
    device, raw, name = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256)
    memory, major, minor = ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    get_uuid(ctypes.byref(raw), device)
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    answer["gpus"].append(
        [str(uuid.UUID(bytes=bytes(raw))), name.value.decode(), [major.value, minor.value], memory.value]
    )
print(json.dumps(answer))
"""
_SECONDS = 60.0  # the driver of a machine with many GPUs that nobody uses may take several to start


def ask_driver(environment: Mapping[str, str] | None = None) -> DriverReport:
    """Ask the NVIDIA driver what a process sees; an empty report if there is no driver, or it does not answer.

    Args:
        environment: Of that process, such as another ``CUDA_VISIBLE_DEVICES``; ``None``: this process's.
    """
    command = [sys.executable, "-I", "-S", "-c", _QUESTION]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True,
            env=dict(os.environ if environment is None else environment),
        )  # fmt: skip
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return DriverReport()
    gpus = tuple(
        VisibleGPU(uuid, name, (major, minor), memory) for uuid, name, (major, minor), memory in answer["gpus"]
    )
    return DriverReport(gpus, None if answer["cuda"] is None else tuple(answer["cuda"]), answer["error"])


def ask_driver_about_all() -> DriverReport:
    """Ask the driver about all GPUs of this machine or container, whatever ``CUDA_VISIBLE_DEVICES`` says."""
    return ask_driver({name: value for name, value in os.environ.items() if name != VARIABLE})


def device_files() -> int:
    """Return how many NVIDIA GPUs the operating system shows, whether or not the driver works."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


# ---------------------------------------------------------------- what is wrong with the GPUs of a run
#
# All functions but the first two take descriptions of GPUs, so that they say the same on any machine. Who asks: the
# strategy when ranks have joined, modules before they load a model, VLLMPool before it starts engines.

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
