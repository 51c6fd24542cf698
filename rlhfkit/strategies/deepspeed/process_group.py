"""``ProcessGroupMixin``: how the ranks of a DeepSpeed strategy find each other, on CPUs and GPUs."""

import dataclasses
import json
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit import gpus
from rlhfkit.gpus import VARIABLE, VisibleGPU, ask_driver_about_all
from rlhfkit.rank_store import call_in_thread
from rlhfkit.strategies.deepspeed import rendezvous
from rlhfkit.strategies.deepspeed.precision import EnginePrecision


class ProcessGroupMixin(DeepSpeedStrategy):
    """The part of :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy` that makes the process group."""

    init_timeout: float
    """Seconds that a rank waits for all others to join."""

    def setup_environment(self) -> None:
        """Join the other ranks; unlike Lightning's version, on CPUs too.

        Raises:
            MisconfigurationException: If this machine has more ranks than they see GPUs.
        """
        assert self.accelerator is not None
        try:
            device = self.root_device
        except IndexError:
            count = len(self.parallel_devices or ())
            raise MisconfigurationException(too_few_devices(self.local_rank, count)) from None
        self.accelerator.setup_device(device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Create the process group, with a time limit that names missing ranks."""
        import deepspeed

        if self.root_device.type == "cpu":
            rendezvous.prepare_cpu()
        for lock in rendezvous.extension_locks():
            rank_zero_warn(
                f"An interrupted build of a torch extension left {lock} behind; loading that extension would wait for"
                " ever. Delete the file if no build is running."
            )
        # torch 2.13 deprecates collectives that deepspeed 0.19.8 calls in every step.
        warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*|.*reduce_scatter_tensor.*")
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._set_node_environment_variables()
        self._process_group_backend = self._get_process_group_backend()
        if not torch.distributed.is_initialized():
            self._join_ranks(self.cluster_environment.main_address, self.cluster_environment.main_port)
        deepspeed.init_distributed(self._process_group_backend, verbose=False, timeout=self._timeout)

    def _join_ranks(self, address: str, port: int) -> None:
        """Create the process group; on GPUs check first that they can work together, then that NCCL connects them."""
        assert self._process_group_backend is not None
        on_gpu = self.root_device.type == "cuda"
        rendezvous.join_process_group(
            self._process_group_backend,
            rank=self.global_rank,
            world_size=self.world_size,
            address=address,
            port=port,
            init_timeout=self.init_timeout,
            timeout=self._timeout,
            description=describe_rank(self.global_rank, self.root_device) if on_gpu else "",
            examine=partial(examine_ranks, dtype=self._training_dtype or torch.float32) if on_gpu else None,
        )
        if on_gpu and self.world_size > 1 and self._process_group_backend == "nccl":
            run_first_collective(
                self._reduce,
                rank=self.global_rank,
                world_size=self.world_size,
                address=f"{address}:{port}",
                seconds=self.init_timeout,
            )

    def _reduce(self) -> None:
        total = torch.ones(1, device=self.root_device)
        torch.distributed.all_reduce(total)
        total.item()

    @property
    def _training_dtype(self) -> torch.dtype | None:
        plugin = self.precision_plugin
        dtype = plugin._desired_dtype if isinstance(plugin, EnginePrecision) else torch.float32
        return None if dtype == torch.float32 else dtype


# ---------------------------------------------------------------- GPUs of the ranks
#
# Nothing here is called on CPUs. Ranks tell one another about their GPUs through the store in which they meet, so
# nothing is sent over NCCL.


def too_few_devices(local_rank: int, seen: int) -> str:
    """Return the error for a rank that sees fewer GPUs than its number among those of its machine."""
    present = len(ask_driver_about_all().gpus) or seen
    return gpus.too_few_devices(local_rank, seen, os.environ.get(VARIABLE), present)


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
        ranks.append(gpus.RankGPU(rank, host, VisibleGPU(**(gpu | {"capability": tuple(gpu["capability"])}))))
    name = str(dtype).removeprefix("torch.")
    unsupported = gpus.unsupported_dtype(ranks, name)
    differ = len({gpus.unsupported_dtype([one], name) is None for one in ranks}) > 1
    problem = gpus.same_gpu_twice(ranks) or (unsupported if differ else None)
    if problem is not None:
        return problem
    if unsupported is not None:
        rank_zero_warn(f"{unsupported}. torch emulates it, slowly; vLLM refuses it")
    mixed = gpus.mixed_kinds(ranks)
    if mixed is not None:
        rank_zero_warn(mixed)
    return None


def run_first_collective(
    collective: Callable[[], None], *, rank: int, world_size: int, address: str, seconds: float
) -> None:
    """Run a collective, so that a network that NCCL cannot use is an error now, and not after 30 minutes.

    In a thread, as the call by which NCCL connects has no time limit.

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
    called = call_in_thread(collective, "first collective")
    ended = bool(wait([called], seconds).done)
    error = called.exception() if ended else None
    if ended and error is None:
        return
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    what = f"failed: {error}" if ended else f"did not end within {seconds:g} s"
    message = (
        f"rank {rank} of {world_size} on {socket.gethostname()}: the first collective over NCCL {what}. The ranks have "
        f"met at {address}, but NCCL connects them on other ports, of the interfaces "
        f"{'that it chooses' if interface is None else f'NCCL_SOCKET_IFNAME={interface}'}. Between machines: have the "
        "firewall pass all TCP ports, or name the interface of the cluster (NCCL_SOCKET_IFNAME=eth0). On one machine: "
        "give containers shared memory (docker run --shm-size=8g). NCCL_DEBUG=INFO shows what NCCL tries; "
        "RLHFDeepSpeedStrategy(init_timeout=...) is the time limit"
    )
    raise (RuntimeError(message) if ended else TimeoutError(message)) from error
