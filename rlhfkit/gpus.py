"""The NVIDIA GPUs that a process sees: what ``CUDA_VISIBLE_DEVICES`` names, and what the driver says of each.

The driver is asked in a short process of its own, so this process neither initializes CUDA nor imports torch; the
answer is what torch would see: in CUDA's order, with the UUIDs of MIG instances. Imports the standard library only, as
the workers of Ray that hold GPUs are sent this file's source.
"""

import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
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
