"""``GPUHolder``: an actor that holds one GPU, and which GPUs Ray has assigned to a worker.

Ray's workers are sent this file's source, so that they start without importing torch: it imports the standard library
only.
"""

import socket
import subprocess
from typing import Any


class GPUHolder:
    """Holds the GPU that Ray has assigned to it, without using it."""

    def gpus(self) -> list[dict[str, Any]]:
        """Return :func:`assigned_gpus` of this actor."""
        return assigned_gpus()


def assigned_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that Ray has assigned to this worker.

    Each has ``host``, ``gpu`` (the id for ``CUDA_VISIBLE_DEVICES``) and ``uuid`` (``None`` if the driver reports none).
    """
    import ray

    names = [str(name) for name in ray.get_gpu_ids()]
    known = _uuids() if names else {}
    return [{"host": socket.gethostname(), "gpu": name, "uuid": known.get(name)} for name in names]


def _uuids() -> dict[str, str]:
    """Return the UUIDs of this machine's GPUs, by number and by ``GPU-<uuid>``; creates no CUDA context."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if "," in line]
    found = {index: uuid.removeprefix("GPU-") for index, uuid in rows}
    return found | {f"GPU-{uuid}": uuid for uuid in found.values()}
