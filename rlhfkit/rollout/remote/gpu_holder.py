"""Which GPU a Ray worker was given, and an actor that does nothing but have one.

Sent to Ray's workers as source, so that they start without importing torch: only the standard library is imported here.
"""

import socket
import subprocess
from typing import Any


class GPUHolder:
    """Has one GPU in Ray's books as long as it lives. It does not touch the GPU itself."""

    def gpus(self) -> list[dict[str, Any]]:
        """See :func:`assigned_gpus`."""
        return assigned_gpus()


def assigned_gpus() -> list[dict[str, Any]]:
    """The GPUs that Ray has given to this worker.

    Returns:
        ``host``, ``gpu`` (by the id that ``CUDA_VISIBLE_DEVICES`` takes) and ``uuid`` (``None`` where no driver says
        it) of each.
    """
    import ray

    names = [str(name) for name in ray.get_gpu_ids()]
    known = _uuids() if names else {}
    return [{"host": socket.gethostname(), "gpu": name, "uuid": known.get(name)} for name in names]


def _uuids() -> dict[str, str]:
    """UUIDs of this machine's GPUs by their numbers and by themselves, without a context on any of them."""
    command = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [[part.strip() for part in line.split(",")] for line in listed.splitlines() if "," in line]
    found = {index: uuid.removeprefix("GPU-") for index, uuid in rows}
    return found | {f"GPU-{uuid}": uuid for uuid in found.values()}
