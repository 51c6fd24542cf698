"""``RayLauncher``: ``trainer.fit`` in the driver, with ranks that are Ray actors in one placement group."""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from rlhfkit.ray_placement import ReservedResources, hold_bundles, release_bundles
from rlhfkit.ray_session import join_or_start_ray
from rlhfkit.strategies.ray import actor as ray_actor
from rlhfkit.strategies.ray.ranks import Ranks
from rlhfkit.strategies.ray.remote_run import RunResult, pickle_run
from rlhfkit.validation import check_integer


class RayLaunchMixin(DeepSpeedStrategy):
    """The part of :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy` that starts ranks."""

    init_timeout: float
    _ray_options: "RayOptions"
    _own_variables: frozenset[str] = frozenset()

    @property
    def own_num_nodes(self) -> int | None:
        """Machines that the strategy itself was given, for ``launcher="ray"``; ``None``: the Trainer's."""
        return self._ray_options.num_nodes if self._ray_options.launcher == "ray" else None

    def _configure_launcher(self) -> None:
        """Choose who starts the ranks, when the Trainer is made.

        Lightning's launcher runs the script again, which is impossible in a notebook: there, Ray starts several ranks,
        and a single rank runs in the notebook's process. Raises MisconfigurationException if Ray is asked for and ranks
        have been started already.
        """
        assert self.cluster_environment is not None
        assert self.parallel_devices is not None
        options, started = self._ray_options, self.cluster_environment.creates_processes_externally
        if options.launcher == "ray" and started:
            raise MisconfigurationException(
                f"launcher='ray' starts the ranks itself, but {type(self.cluster_environment).__name__} says that this"
                " process is one of several already: start the script once, with plain python, or leave launcher out."
            )
        if started or options.launcher == "subprocess" or not (options.launcher == "ray" or _IS_INTERACTIVE):
            super()._configure_launcher()
            return
        self.num_nodes = options.num_nodes or self.num_nodes
        num_ranks, device = self.num_nodes * self.num_processes, self.parallel_devices[0].type
        if num_ranks == 1 and options.launcher is None:
            return
        default = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        asked = options.resources_per_rank or {}
        self._launcher = RayLauncher(
            num_ranks=num_ranks,
            num_nodes=self.num_nodes,
            resources_per_rank=asked if isinstance(asked, ReservedResources) else default | dict(asked),
            device=device,
            timeout=self.init_timeout,
            return_weights=options.return_weights,
        )
        self.cluster_environment = RayEnvironment(num_ranks)

    @staticmethod
    def run_on_ray(
        function: Callable[[ClusterEnvironment], Any],
        *,
        num_ranks: int,
        num_nodes: int,
        resources_per_rank: dict[str, float],
        device: str,
        timeout: float,
        on_start: Callable[[Sequence[Any]], None],
    ) -> Any:
        """Call a function on new ranks that make a Trainer of their own, and return the result of rank 0.

        Args:
            function: Gets the environment that the Trainer is given as a plugin; picklable.
            num_ranks: See :class:`RayLauncher`, also for the others.
            num_nodes: Machines.
            resources_per_rank: Ray resources of a rank.
            device: ``"cpu"`` or ``"cuda"``.
            timeout: Seconds until all ranks must have started.
            on_start: Called with the actors of the ranks; killing them ends this call.

        Raises:
            PlacementError: If Ray cannot place the ranks.
            RankError: If a rank died.
            BaseException: The error of a rank.
        """
        launcher = RayLauncher(
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            resources_per_rank=resources_per_rank,
            device=device,
            timeout=timeout,
            return_weights=False,
            on_start=on_start,
        )
        return launcher.launch(function, RayEnvironment(num_ranks))

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        if isinstance(self.cluster_environment, RayEnvironment):
            assert self.parallel_devices is not None
            return self.cluster_environment.device(self.parallel_devices[0].type)
        return super().root_device

    def _set_node_environment_variables(self) -> None:
        """Set the variables from which DeepSpeed reads the rank; :meth:`teardown` removes them."""
        before = set(os.environ)
        super()._set_node_environment_variables()
        self._own_variables |= set(os.environ) - before

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a run on ranks; MisconfigurationException in the driver of ranks on Ray, which has no engines."""
        if not isinstance(self._launcher, RayLauncher):
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.lightning_module is None or not self.lightning_module.trainer.interrupted:
            raise MisconfigurationException(
                "The ranks on Ray have ended, and the optimizers with them. Save checkpoints from callbacks, such as"
                " ModelCheckpoint(save_last=True); trained weights are in the module: use its state_dict()."
            )
        # After an error OnExceptionCheckpoint calls this too; it has already saved on the ranks.

    def teardown(self) -> None:
        """Remove the variables that a single rank has set: the next Trainer would assume that it was launched."""
        super().teardown()
        for name in self._own_variables:
            os.environ.pop(name, None)
        self._own_variables = frozenset()


@dataclass(frozen=True)
class RayOptions:
    """The strategy's arguments for starting ranks, checked."""

    launcher: Literal["ray", "subprocess"] | None
    num_nodes: int | None
    resources_per_rank: Mapping[str, float] | None
    return_weights: bool | None

    def __post_init__(self) -> None:
        needs = self.resources_per_rank
        if self.launcher not in (None, "ray", "subprocess"):
            raise ValueError(f"launcher must be 'ray', 'subprocess' or None, got {self.launcher!r}.")
        if self.launcher == "subprocess" and (self.num_nodes, needs) != (None, None):
            raise ValueError("num_nodes and resources_per_rank are for launcher='ray'; use Trainer(num_nodes=...).")
        check_integer("num_nodes", self.num_nodes, minimum=1, optional=True)
        if needs is not None and not (needs and all(amount > 0 for amount in needs.values())):
            raise ValueError(f"resources_per_rank must name positive amounts, as in {{'CPU': 1}}, got {dict(needs)}.")
        if needs is not None and needs.get("GPU", 1) % 1:
            raise ValueError(f"A rank needs whole GPUs, as NCCL does not share them; got {dict(needs)}.")

    @property
    def accelerator(self) -> Accelerator | None:
        """Accelerator for Lightning if ranks use GPUs and the driver's machine has none; else ``None``."""
        wants_gpus = self.launcher == "ray" and "GPU" in (self.resources_per_rank or {})
        return RemoteCUDAAccelerator() if wants_gpus and not torch.cuda.is_available() else None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """The driver's environment where Ray starts the ranks; ``None``: Lightning finds out who does.

        Lightning takes the variables of a Slurm job with ``--ntasks`` for those of a rank, also in its batch script,
        where the script runs once. Raises MisconfigurationException in one of several tasks of ``srun``.
        """
        if self.launcher != "ray" or TorchElasticEnvironment.detect():
            return None
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            raise MisconfigurationException(
                "launcher='ray' starts the ranks itself, and srun has started this script as one of "
                f"{os.environ['SLURM_STEP_NUM_TASKS']} tasks: start it once (srun --ntasks=1, or without srun in the "
                "batch script), or leave launcher out"
            )
        return LightningEnvironment()


def require_ray() -> Any:
    """Return the ``ray`` module, or raise ModuleNotFoundError with the extra to install."""
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(
            "Starting ranks with Ray (launcher='ray', or any notebook with several devices) needs Ray, which is not"
            " installed: pip install 'rlhfkit[rollout]', or 'rlhfkit[cpu]' on a machine without GPUs."
        )
    import ray

    return ray


def placement_strategy(num_ranks: int, num_nodes: int) -> str:
    """Return Ray's strategy for spreading the ranks over machines.

    - One machine: ``STRICT_PACK``, all ranks on one, with shared memory and fast links.
    - One rank on each of several machines: ``STRICT_SPREAD``.
    - Several ranks on several machines: ``PACK``, which fills machines one after another, as Ray cannot place k ranks
      on each. An uneven split trains the same, because ranks are numbered after placement.
    """
    if num_nodes == 1:
        return "STRICT_PACK"
    return "STRICT_SPREAD" if num_ranks == num_nodes else "PACK"


@dataclass(kw_only=True, eq=False)
class RayLauncher(_Launcher):
    """Runs ``trainer.fit`` and other methods on ranks that are Ray actors, and returns the results to the driver.

    The script or notebook runs once, in the driver; every run starts new processes. The Trainer is pickled with its
    module, callbacks and data (classes of ``__main__`` by value, so notebooks work).

    The driver gets the weights of trained children, metrics, counters, states of callbacks (``best_model_path``) and of
    the DataModule, ``trainer.state``, and the return value of rank 0. Other attributes that hooks set on the module or
    on callbacks stay on the ranks.
    """

    num_ranks: int
    """World size."""
    num_nodes: int
    """Machines to use; see :func:`placement_strategy`."""
    resources_per_rank: dict[str, float]
    """Ray resources of one rank, such as ``{"CPU": 2, "GPU": 1}``, or those that a :class:`~rlhfkit.Placement` holds,
    which are used again by the next run."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    timeout: float
    """Seconds that Ray may take to place the ranks, and their processes to start."""
    return_weights: bool | None
    """Whether the driver's module gets the trained weights; ``None``: if they have at most 8 GB."""
    on_start: Callable[[Sequence[Any]], None] | None = None
    """Called with the actors of the ranks when they have started."""

    @property
    def is_interactive_compatible(self) -> bool:
        """True: Ray works in notebooks."""
        return True

    def kill(self, signum: Any) -> None:
        """Do nothing: :meth:`launch` stops the ranks when it ends, also on Ctrl-C."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function, such as a method of ``trainer``, on all ranks; return the result of rank 0.

        The other results of a run are loaded into ``trainer``, if given.

        Raises:
            PlacementError: If Ray cannot place the ranks.
            RankError: If a rank died.
            BaseException: The error of a rank, with its traceback as the cause.
        """
        ray = require_ray()
        ray.cloudpickle.register_pickle_by_value(ray_actor)  # see that module's docstring
        work = pickle_run(function, args, kwargs, trainer, self.return_weights)
        # Ranks may claim more CPUs than the machine has; all of its cores stay free for engines.
        claimed = int(self.num_ranks * self.resources_per_rank.get("CPU", 0))
        join_or_start_ray(num_cpus=claimed + (os.cpu_count() or 1))
        if trainer is not None:
            trainer.lightning_module.trainer = trainer  # the hooks for errors need it
        with self._ranks() as ranks:
            work_in_store = ray.put(work)
            del work
            result = ranks.wait([actor.run.remote(work_in_store) for actor in ranks.actors])
        if trainer is None:
            return result
        assert isinstance(result, RunResult)
        data = next((one for one in (*args, *kwargs.values()) if isinstance(one, pl.LightningDataModule)), None)
        result.restore(trainer, data)
        return result.value

    @contextmanager
    def _ranks(self) -> Iterator[Ranks]:
        """Start ranks, and stop them when the context ends."""
        own_group, held = None, self.resources_per_rank
        if isinstance(held, ReservedResources):
            held.check_processes(self.num_ranks, "rank(s)")
        else:
            own_group = hold_bundles(
                self.resources_per_rank,
                self.num_ranks,
                strategy=placement_strategy(self.num_ranks, self.num_nodes),
                timeout=self.timeout,
                what="rank(s)",
                cure=(
                    "End what else uses the cluster, add machines, or change Trainer(devices=...),"
                    " RLHFDeepSpeedStrategy(num_nodes=..., resources_per_rank=..., init_timeout=...)."
                ),
                machines=self.num_nodes,
            )
            held = ReservedResources(held, own_group.id.hex(), range(self.num_ranks))
        ranks = Ranks(held)
        try:
            ranks.start(self.num_ranks, self.device, self.timeout)
            if self.on_start is not None:
                self.on_start(ranks.actors)
            yield ranks
        finally:
            ranks.stop()
            if own_group is not None:
                release_bundles(own_group)


# ---------------------------------------------------------------- environment of ranks


class RayEnvironment(ClusterEnvironment):
    """Rank numbers from the variables that :mod:`rlhfkit.strategies.ray.ranks` has set; 0 in the driver.

    Setters do nothing: Lightning would compute the rank as if all machines had equally many ranks.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size

    @property
    def creates_processes_externally(self) -> bool:
        """True, so that Lightning does not start processes."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port on the host of rank 0."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """False: the strategy chooses this environment."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing."""

    def global_rank(self) -> int:
        """Rank among all ranks."""
        return int(os.environ.get("RANK", 0))

    def set_global_rank(self, rank: int) -> None:
        """Do nothing."""

    def local_rank(self) -> int:
        """Rank among those of this machine."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        """Number of this machine, in the order of the ranks."""
        return int(os.environ.get("NODE_RANK", 0))

    def device(self, kind: str) -> torch.device:
        """Return this rank's device: all ranks of a machine see the same GPUs, and each uses that of its local rank."""
        return torch.device(kind, self.local_rank()) if kind == "cuda" else torch.device(kind)


class RemoteCUDAAccelerator(CUDAAccelerator):
    """GPUs on machines that Ray will choose; Lightning's own accelerator needs them on the driver's machine."""

    @staticmethod
    def is_available() -> bool:
        """True: Ray finds out when it places the ranks."""
        return True

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Convert ``Trainer(devices=...)`` to device numbers, as many as ranks per machine."""
        count = len(devices) if isinstance(devices, list) else int(devices)
        if count < 1:
            RemoteCUDAAccelerator.auto_device_count()
        return list(range(count))

    @staticmethod
    def auto_device_count() -> int:
        """Raise MisconfigurationException: GPUs of other machines cannot be counted here."""
        raise MisconfigurationException(
            "This machine has no GPU to count, so Trainer(devices=...) must say how many ranks to start per machine."
        )

    @staticmethod
    def name() -> str:
        """Name in Lightning's registry of accelerators."""
        return "rlhf_remote_cuda"
