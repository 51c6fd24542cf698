"""Which way weights take: ``VLLMPool(transfer=...)`` checked, ``"auto"`` resolved, and the sender for it."""

from typing import Literal, cast, get_args

from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender
from rlhfkit.rollout.weight_sync.process_group.groups import Backend
from rlhfkit.rollout.weight_sync.process_group.sender import ProcessGroupSender
from rlhfkit.rollout.weight_sync.sender import WeightSender
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES, GPU_BUCKET_BYTES

Transfer = Literal["auto", "gloo", "nccl", "ipc"]


def check_transfer(transfer: str, *, device: str | None, colocate: bool) -> Transfer:
    """Return the transfer; ValueError if it is unknown or impossible on this device or beside the ranks.

    ``device``: ``"cpu"``, ``"cuda"`` or, if not known yet, ``None``.
    """
    if transfer not in get_args(Transfer):
        allowed = ", ".join(map(repr, get_args(Transfer)))
        raise ValueError(f"transfer must be one of {allowed}, got {transfer!r}")
    if transfer in ("nccl", "ipc") and device == "cpu":
        raise ValueError(
            f"transfer={transfer!r} sends from GPU to GPU, and the engines are on CPUs: use 'auto' or 'gloo'"
        )
    if transfer == "ipc" and not colocate:
        raise ValueError(
            "transfer='ipc' passes handles to memory of a GPU that engine and rank share: it needs colocate=True; use "
            "'auto' or 'nccl' for engines with GPUs of their own"
        )
    if transfer == "nccl" and colocate:
        raise ValueError(
            "transfer='nccl' cannot connect two processes on one GPU, which colocate=True means: use 'auto', "
            "'ipc', or 'gloo' (through main memory)"
        )
    return cast(Transfer, transfer)


def resolve_transfer(transfer: Transfer, *, device: str, colocate: bool) -> Transfer:
    """Return the transfer that ``"auto"`` stands for: gloo on CPUs, IPC when colocated, else NCCL.

    Raises ValueError as :func:`check_transfer` for a device that was not known before.
    """
    check_transfer(transfer, device=device, colocate=colocate)
    if transfer != "auto":
        return transfer
    if device == "cpu":
        return "gloo"
    return "ipc" if colocate else "nccl"


def make_sender(transfer: Transfer, *, timeout: float, bucket_bytes: int | None) -> WeightSender:
    """Return the sender of a resolved transfer.

    Args:
        transfer: As :func:`resolve_transfer` returns it.
        timeout: Seconds for each step.
        bucket_bytes: Bytes of a bucket; ``None``: 64 MiB through main memory, 512 MiB between GPUs.
    """
    if bucket_bytes is None:
        bucket_bytes = DEFAULT_BUCKET_BYTES if transfer == "gloo" else GPU_BUCKET_BYTES
    if transfer == "ipc":
        return IPCSender(bucket_bytes=bucket_bytes)
    backend: Backend = "nccl" if transfer == "nccl" else "gloo"
    return ProcessGroupSender(backend, timeout=timeout, bucket_bytes=bucket_bytes)
