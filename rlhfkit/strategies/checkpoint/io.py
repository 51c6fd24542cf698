"""Save and load runs whose weights live in DeepSpeed engines: shards of engines, state of each rank."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.errors import explain_unpickling_errors
from rlhfkit.checkpoints.files import explain_write_errors
from rlhfkit.checkpoints.progress import normalize_counters
from rlhfkit.distributed import gather_objects
from rlhfkit.strategies.checkpoint import directory, universal, verification
from rlhfkit.strategies.checkpoint.hashing import rank_of_file, sync_and_hash, threads_per_rank
from rlhfkit.strategies.checkpoint.slow_steps import on_rank_zero
from rlhfkit.strategies.deepspeed.engines import EngineOptimizer
from rlhfkit.strategies.deepspeed.zero3 import load_full_state_dict

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_TAG = "checkpoint"


class EngineCheckpointMixin(DeepSpeedStrategy):
    """The part of :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy` that saves and loads checkpoints.

    A checkpoint is a directory::

        step=100.ckpt/
            manifest.json          files, sizes, SHA-256, number of ranks
            policy/checkpoint/...  DeepSpeed's shards of one engine: weights and optimizer
            rank_00000.pt          everything else of one rank: loops, callbacks, loaders, schedulers, random state

    It is written to ``step=100.ckpt.tmp``, on a file system that all ranks share, and renamed when complete. Frozen
    children are not in it. :class:`~rlhfkit.checkpoints.ExactResume`, which the strategy adds to the callbacks, saves
    random states and the exact position in the run.
    """

    saves_every_rank = True
    """Checkpoints have the random state and the loaders of each rank."""

    engines: dict[str, "DeepSpeedEngine"]
    frozen_engines: dict[str, "DeepSpeedEngine"]
    frozen_children: set[str]
    _accumulating: set[str]
    checkpoint_timeout: float = 7200.0
    """Seconds that ranks wait for one another while they verify a checkpoint, or convert it for other ranks."""

    @property
    def _hashing_threads(self) -> int:
        return threads_per_rank(self.num_processes)

    def unwrapped_child(self, name: str) -> nn.Module:
        """Return a child of the LightningModule, or the module inside its engine."""
        assert self.lightning_module is not None
        engine = {**self.engines, **self.frozen_engines}.get(name)
        module: nn.Module = self.lightning_module.get_submodule(name) if engine is None else engine.module
        return module

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a run to the directory ``filepath`` of rank 0; TypeError for ``storage_options``. A collective."""
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes directories itself; storage_options are not supported.")
        path = Path(self.broadcast(str(filepath)))
        try:
            self._write(path, checkpoint)
        except CheckpointError:
            if self.is_global_zero:
                shutil.rmtree(directory.temporary_path(path), ignore_errors=True)
            raise
        self.barrier()

    def _write(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        with explain_write_errors(path):
            self._write_files(path, checkpoint)
            self.barrier()  # all files exist
            folder = directory.temporary_path(path)
            names = [name for name in directory.list_files(folder) if rank_of_file(name) == self.global_rank]
            records = gather_objects(sync_and_hash(folder, names, threads=self._hashing_threads))
            if self.is_global_zero:
                self._commit(path, records, checkpoint)

    def _write_files(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        if self.is_global_zero:
            directory.create_temporary(path)
        self.barrier()
        folder = directory.temporary_path(path)
        for name, engine in self.engines.items():
            engine.save_checkpoint(
                str(folder / name),
                tag=_TAG,
                save_latest=False,
                # Lets deepspeed's converter change the number of ranks of ZeRO 1 and 2 checkpoints.
                client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}},
                exclude_frozen_parameters=self.exclude_frozen_parameters,
            )
        state = {key: value for key, value in checkpoint.items() if key != "optimizer_states"}
        torch.save(state, folder / rank_file(self.global_rank))

    def _commit(self, path: Path, records: list[dict[str, Any]], checkpoint: Mapping[str, Any]) -> None:
        about = {
            "saved_at": time.time(),
            "world_size": self.world_size,
            "global_step": checkpoint.get("global_step"),
            "engines": {name: engine.zero_optimization_stage() for name, engine in self.engines.items()},
        }
        directory.commit(path, {name: record for part in records for name, record in part.items()}, about)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a run into the engines. If the checkpoint is damaged, warn and load the newest intact older one.

        ``weights_only=False`` allows pickled objects of callbacks or DataModules, which can run code. ``None`` means
        True: Lightning does not pass the argument on for strategies that restore after setup.

        Raises:
            CheckpointError: If no intact checkpoint is found, if this run trains other engines or uses other stages, or
                if it has another number of ranks for which DeepSpeed or the data cannot be split.
        """
        assert self.lightning_module is not None
        path = self._choose_checkpoint(Path(checkpoint_path))
        manifest = directory.read_manifest(path)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        same_ranks = manifest["world_size"] == self.world_size
        if fitting:
            self._require_same_engines(path, manifest)
            if not same_ranks:
                self._prepare_other_ranks(path, manifest)
            self._load_engines(path, manifest)
        else:
            self._load_weights(path, manifest)
        file = path / rank_file(self.global_rank if same_ranks else 0)
        with explain_unpickling_errors(file):
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
        if fitting:
            normalize_counters(state["loops"]["fit_loop"])
        return state

    def _choose_checkpoint(self, wanted: Path) -> Path:
        """Verify the checkpoint, every rank its files; all ranks get the same path or the same error. A collective."""
        found, reasons = verification.find_intact(
            wanted, timeout=self.checkpoint_timeout, threads=self._hashing_threads
        )
        if found != wanted:
            rank_zero_warn(
                f"The checkpoint {wanted} is damaged ({' '.join(reasons)}) Loading the newest intact one saved"
                f" before it: {found}. {verification.lost_steps(wanted, found)}"
            )
        return found

    def _require_same_engines(self, path: Path, manifest: Mapping[str, Any]) -> None:
        if set(manifest["engines"]) != set(self.engines):
            raise CheckpointError(
                f"{path} holds the engines {sorted(manifest['engines'])}, this run trains {sorted(self.engines)}."
            )
        for name, engine in self.engines.items():
            stage = manifest["engines"][name]
            if stage != engine.zero_optimization_stage():
                raise CheckpointError(
                    f"{path}: '{name}' was saved at ZeRO stage {stage} and this run uses"
                    f" {engine.zero_optimization_stage()}; resume with the same stage."
                )

    def _prepare_other_ranks(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raise if the data cannot be split over another number of ranks; warn about what is not restored."""
        on_rank_zero(
            lambda: universal.require_common_position(
                path, [path / rank_file(r) for r in range(manifest["world_size"])]
            ),
            timeout=self.checkpoint_timeout,
            doing=f"comparing the loaders in {path}",
        )
        rank_zero_warn(
            f"{path} was saved by {manifest['world_size']} rank(s) and this run has {self.world_size}: weights,"
            " optimizers and schedules are restored, random states, which are per rank, are not."
        )

    def _load_engines(self, path: Path, manifest: Mapping[str, Any]) -> None:
        other_ranks = manifest["world_size"] != self.world_size
        to_convert = [name for name, stage in manifest["engines"].items() if stage > 0 and other_ranks]
        for name in self.engines:  # in this order on every rank: loading is a collective at stage 3
            if name in to_convert:
                continue
            loaded, _ = self.engines[name].load_checkpoint(
                str(path / name),
                tag=_TAG,
                load_module_strict=not self.exclude_frozen_parameters,
                load_lr_scheduler_states=False,
            )
            if loaded is None:
                raise CheckpointError(f"DeepSpeed found nothing to load in {path / name}.")
        if to_convert:
            with universal.converted(path, to_convert, manifest, timeout=self.checkpoint_timeout) as folder:
                for name in to_convert:
                    universal.load_converted(self.engines[name], folder / name, _TAG)
        for optimizer in self.optimizers:
            assert isinstance(optimizer, EngineOptimizer)
            optimizer.share_groups()

    def _load_weights(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Load full weights for validation, test and prediction, saved at any stage and by any number of ranks."""
        assert self.lightning_module is not None
        for name in manifest["engines"]:
            state = saved_weights(path, name) if self.is_global_zero else {}
            load_full_state_dict(self.unwrapped_child(name), state, from_rank_zero=self.world_size > 1)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return state outside the engines and frozen children, such as metrics and buffers."""
        module = self.lightning_module
        assert module is not None
        names = {*self.engines, *self.frozen_children}
        skip = tuple(f"{name}." for name in names)
        hidden: dict[str, nn.Module | None] = {name: module._modules[name] for name in names}
        order = list(module._modules)
        try:
            for name in hidden:
                module._modules[name] = None  # avoids materialising sharded weights only to drop them
            return {key: value for key, value in module.state_dict().items() if not key.startswith(skip)}
        finally:
            for name in order:
                if name in hidden:
                    module._modules[name] = hidden[name]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state outside the engines; :meth:`load_checkpoint` loads theirs."""
        assert self.lightning_module is not None
        if checkpoint.get("state_dict"):
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return an empty dictionary: the engines save their shards."""
        return {}

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engines restore their shards."""
        return False

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, unless it is the last intact one of its folder."""
        path = Path(filepath)
        if not self.is_global_zero or not path.exists():
            return
        for other in path.parent.iterdir():
            if other == path or other.name.endswith((".tmp", ".deleted", ".old")):
                continue
            try:
                verification.verify(other, checksums=False)
            except (CheckpointError, OSError):
                continue
            directory.remove(path)
            return
        rank_zero_warn(f"Not deleting {path}: it is the only complete checkpoint in its folder.")


def saved_weights(checkpoint: Path, child: str) -> dict[str, Tensor]:
    """Read the full weights of one child from a checkpoint: fp32, or at stage 0 in training precision."""
    stage = directory.read_manifest(checkpoint)["engines"][child]
    folder = checkpoint / child
    if stage == 0:
        file = folder / _TAG / "mp_rank_00_model_states.pt"
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=False)["module"]
        return weights
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)
    return dict(weights)


def rank_file(rank: int) -> str:
    """Return the name of the file with the state of a rank outside its engines."""
    return f"rank_{rank:05d}.pt"
