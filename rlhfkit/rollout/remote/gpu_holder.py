"""``GPUHolder``: an actor that holds one GPU, and which GPUs Ray has assigned to a worker.

Ray's workers are sent the source of this file and of ``gpus.py``, so that they start without importing torch.
"""

import os
import socket
from typing import Any

from rlhfkit.gpus import VARIABLE, ask_driver


class GPUHolder:
    """Holds the GPU that Ray has assigned to it, without using it."""

    def gpus(self) -> list[dict[str, Any]]:
        """Return :func:`assigned_gpus` of this actor."""
        return assigned_gpus()


def assigned_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that Ray has assigned to this worker.

    Each has ``host``, ``gpu`` (the id for ``CUDA_VISIBLE_DEVICES``), and, if the driver reports it, ``uuid``, ``kind``
    (its name) and ``memory`` in bytes.
    """
    import ray

    names = [str(name) for name in ray.get_gpu_ids()]
    known = ask_driver({**os.environ, VARIABLE: ",".join(names)}).gpus if names else ()
    if len(known) != len(names):  # no driver, or not NVIDIA's
        return [{"host": socket.gethostname(), "gpu": name} for name in names]
    return [
        {"host": socket.gethostname(), "gpu": name, "uuid": gpu.uuid, "kind": gpu.name, "memory": gpu.memory}
        for name, gpu in zip(names, known, strict=True)
    ]
