"""What a rank on a GPU checks before anything is loaded: its device, those of the other ranks, and that NCCL connects.

Nothing here is called on CPUs. Ranks tell one another about their GPUs through the store in which they meet, so nothing
is sent over NCCL.
"""

import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit import gpu_checks
from rlhfkit.gpus import VARIABLE, VisibleGPU, ask_driver_about_all


def too_few_devices(local_rank: int, seen: int) -> str:
    """Return the error for a rank that sees fewer GPUs than its number among those of its machine."""
    present = len(ask_driver_about_all().gpus) or seen
    return gpu_checks.too_few_devices(local_rank, seen, os.environ.get(VARIABLE), present)


def describe_rank(rank: int, device: torch.device) -> str:
    """Return this rank's GPU as text for :func:`examine_ranks`."""
    cuda: Any = torch.cuda  # has no types
    found = cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", ""))  # absent from builds for AMD
    gpu = VisibleGPU(uuid, found.name, (found.major, found.minor), found.total_memory)
    return json.dumps([rank, socket.gethostname(), dataclasses.asdict(gpu)])


def examine_ranks(descriptions: Sequence[str], dtype: torch.dtype) -> str | None:
    """Return what is wrong with the GPUs of all ranks, for an error on all; warn of what only costs speed.

    Args:
        descriptions: Of :func:`describe_rank`, by rank.
        dtype: In which models compute.
    """
    ranks = []
    for text in descriptions:
        rank, host, gpu = json.loads(text)
        ranks.append(gpu_checks.RankGPU(rank, host, VisibleGPU(**(gpu | {"capability": tuple(gpu["capability"])}))))
    name = str(dtype).removeprefix("torch.")
    unsupported = gpu_checks.unsupported_dtype(ranks, name)
    differ = len({gpu_checks.unsupported_dtype([one], name) is None for one in ranks}) > 1
    problem = gpu_checks.same_gpu_twice(ranks) or (unsupported if differ else None)
    if problem is not None:
        return problem
    if unsupported is not None:
        rank_zero_warn(f"{unsupported}. torch emulates it, slowly; vLLM refuses it")
    mixed = gpu_checks.mixed_kinds(ranks)
    if mixed is not None:
        rank_zero_warn(mixed)
    return None


def connect_over_nccl(device: torch.device, *, rank: int, world_size: int, address: str, seconds: float) -> None:
    """Run a first collective, so that a network that NCCL cannot use is an error now, and not after 30 minutes."""

    def reduce() -> None:
        total = torch.ones(1, device=device)
        torch.distributed.all_reduce(total)
        total.item()

    run_first_collective(reduce, rank=rank, world_size=world_size, address=address, seconds=seconds)


def run_first_collective(
    collective: Callable[[], None], *, rank: int, world_size: int, address: str, seconds: float
) -> None:
    """Run a collective in a thread, as the call by which NCCL connects has no time limit.

    Args:
        collective: Returns when it is complete.
        rank: Of this process, of ``world_size``.
        world_size: Number of ranks.
        address: Address and port at which ranks have met.
        seconds: Time limit.

    Raises:
        TimeoutError: If it takes longer.
        RuntimeError: If it fails.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            collective()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="first collective", daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive() and not errors:
        return
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    what = f"failed: {errors[0]}" if errors else f"did not end within {seconds:g} s"
    message = (
        f"rank {rank} of {world_size} on {socket.gethostname()}: the first collective over NCCL {what}. The ranks have "
        f"met at {address}, but NCCL connects them on other ports, of the interfaces "
        f"{'that it chooses' if interface is None else f'NCCL_SOCKET_IFNAME={interface}'}. Between machines: have the "
        "firewall pass all TCP ports, or name the interface of the cluster (NCCL_SOCKET_IFNAME=eth0). On one machine: "
        "give containers shared memory (docker run --shm-size=8g). NCCL_DEBUG=INFO shows what NCCL tries; "
        "RLHFDeepSpeedStrategy(init_timeout=...) is the time limit"
    )
    raise (RuntimeError(message) if errors else TimeoutError(message)) from (errors[0] if errors else None)
