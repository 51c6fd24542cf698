"""``ProcessGroupMixin``: how the ranks of a DeepSpeed strategy find each other, on CPUs and GPUs."""

import warnings
from functools import partial

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn

from rlhfkit.strategies.deepspeed import gpu_setup, rendezvous
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
            raise MisconfigurationException(gpu_setup.too_few_devices(self.local_rank, count)) from None
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
            description=gpu_setup.describe_rank(self.global_rank, self.root_device) if on_gpu else "",
            examine=partial(gpu_setup.examine_ranks, dtype=self._training_dtype or torch.float32) if on_gpu else None,
        )
        if on_gpu and self.world_size > 1 and self._process_group_backend == "nccl":
            gpu_setup.connect_over_nccl(
                self.root_device,
                rank=self.global_rank,
                world_size=self.world_size,
                address=f"{address}:{port}",
                seconds=self.init_timeout,
            )

    @property
    def _training_dtype(self) -> torch.dtype | None:
        plugin = self.precision_plugin
        dtype = plugin._desired_dtype if isinstance(plugin, EnginePrecision) else torch.float32
        return None if dtype == torch.float32 else dtype
