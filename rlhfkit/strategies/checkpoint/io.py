"""Save and load runs whose weights live in DeepSpeed engines: shards of engines, state of each rank."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import MODULE_FOLDER, explain_unpickling_errors, explain_write_errors
from rlhfkit.checkpoints.resume import normalize_counters
from rlhfkit.protocols import STATES_OF_RANKS, KeepsFolder
from rlhfkit.strategies.checkpoint import directory, universal, verification
from rlhfkit.strategies.checkpoint.engine_files import Write, errors_at_the_end, snapshot, snapshots_of, write_file
from rlhfkit.strategies.checkpoint.saving import BackgroundSave, save_directory
from rlhfkit.strategies.checkpoint.slow_steps import on_rank_zero
from rlhfkit.strategies.deepspeed.engines import EngineOptimizer
from rlhfkit.strategies.deepspeed.zero3 import load_full_state_dict
from rlhfkit.trainer_parts import callbacks_of

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_TAG = "checkpoint"


class EngineCheckpointMixin(DeepSpeedStrategy):
    """The part of :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy` that saves and loads checkpoints.

    A checkpoint is a directory::

        step=100.ckpt/
            manifest.json          files, sizes, number of ranks
            policy/checkpoint/...  DeepSpeed's shards of one engine: weights and optimizer
            module/...             what the module saves by itself, such as a critic with ranks of its own
            rank_00000.pt          everything else of one rank: loops, callbacks, loaders, schedulers, random state

    It is written to ``step=100.ckpt.tmp``, on a file system that all ranks share, and renamed when complete. Frozen
    children are not in it. :class:`~rlhfkit.checkpoints.ExactResume`, which the strategy adds to the callbacks, saves
    random states and the exact position in the run.
    """

    saves_every_rank = True
    """Checkpoints have the random state and the loaders of each rank."""

    @property
    def saves_folders(self) -> bool:
        """Whether a module can write a folder of its own into checkpoints: not while they are written in a thread."""
        return not self.async_save

    engines: dict[str, "DeepSpeedEngine"]
    frozen_engines: dict[str, "DeepSpeedEngine"]
    frozen_children: set[str]
    _accumulating: set[str]
    async_save: bool = False
    tensor_parallel_size: int = 1
    snapshot_bytes = 0
    """CPU memory of this rank that the last save with ``async_save`` took until it was written."""
    _background_save: BackgroundSave | None = None
    checkpoint_timeout: float = 7200.0
    """Seconds that ranks wait for one another while they verify a checkpoint, or convert it for other ranks."""

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
        self.wait_for_saves()
        if self.async_save:
            self._begin_background_save(path, checkpoint)
            return
        folder = directory.temporary_path(path)

        def write_files() -> None:
            with errors_at_the_end(self.engines.values()):
                for name, engine in self.engines.items():
                    self._save_engine(engine, folder / name)
            torch.save(_state_outside_engines(checkpoint), folder / rank_file(self.global_rank))

        save_directory(
            path,
            [write_files, lambda: self._write_module_folder(folder)],
            self._about(checkpoint),
            timeout=self.checkpoint_timeout,
            folders=[f"{name}/{_TAG}" for name in self.engines],  # which DeepSpeed creates too late for some ranks
        )

    def _write_module_folder(self, folder: Path) -> None:
        for keeper in self._folder_keepers():
            keeper.save_folder(folder / MODULE_FOLDER)

    def _folder_keepers(self) -> list[KeepsFolder]:
        """Callbacks with state in a folder of the checkpoint."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        return [] if trainer is None else [one for one in callbacks_of(trainer) if isinstance(one, KeepsFolder)]

    def _save_engine(self, engine: "DeepSpeedEngine", folder: Path) -> None:
        # Lets deepspeed's converter change the number of ranks of ZeRO 1 and 2 checkpoints. With tensor parallelism
        # DeepSpeed writes what it needs to join the parts.
        info = {} if self.tensor_parallel_size > 1 else {"universal_checkpoint_version": 0.4}
        engine.save_checkpoint(
            str(folder),
            tag=_TAG,
            save_latest=False,
            client_state={"universal_checkpoint_info": info} if info else {},
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )

    def _begin_background_save(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        """Copy this rank's state into memory and let a thread write it. A collective."""
        # At once, as ModelCheckpoint(save_last="link") puts its link there.
        on_rank_zero(lambda: _create_parent(path), timeout=self.checkpoint_timeout, doing=f"creating {path.parent}")
        folder, writes = directory.temporary_path(path), []
        for name, engine in self.engines.items():
            with snapshots_of(engine) as files:
                self._save_engine(engine, folder / name)
            writes += files
        state, num_bytes = snapshot(_state_outside_engines(checkpoint))
        writes.append(Write(folder, partial(write_file, state, folder / rank_file(self.global_rank)), num_bytes))
        self.snapshot_bytes = sum(file.num_bytes for file in writes)
        self._background_save = BackgroundSave(path, writes, self._about(checkpoint), timeout=self.checkpoint_timeout)

    def wait_for_saves(self) -> None:
        """Wait until the checkpoint that is being written in the background, if any, is complete.

        With ``async_save``. The next save and the end of every run do it by themselves. On all ranks.

        Raises:
            CheckpointError: On all ranks, if it could not be written; or after ``checkpoint_timeout`` seconds.
        """
        save, self._background_save = self._background_save, None
        if save is not None:
            save.wait(self.checkpoint_timeout)

    def _finish_saves(self) -> None:
        """Wait for the checkpoint that is being written; if the run has failed already, its error is only shown."""
        module = self.lightning_module
        try:
            self.wait_for_saves()
        except CheckpointError as error:
            if module is None or not module.trainer.interrupted:
                raise
            rank_zero_warn(str(error))

    def _about(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "saved_at": time.time(),
            "world_size": self.world_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "global_step": checkpoint.get("global_step"),
            "engines": {name: engine.zero_optimization_stage() for name, engine in self.engines.items()},
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a run into the engines. If the checkpoint is damaged, warn and load the newest intact older one.

        ``weights_only=False`` allows pickled objects of callbacks or DataModules, which can run code. ``None`` means
        True: Lightning does not pass the argument on for strategies that restore after setup.

        Raises:
            CheckpointError: If no intact checkpoint is found, if this run trains other engines, at another ZeRO stage
                or with another ``tensor_parallel_size``, or if it has another number of ranks and the optimizer's
                state or the data cannot be divided over them.
        """
        assert self.lightning_module is not None
        self.wait_for_saves()
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
        for keeper in self._folder_keepers() if fitting else []:
            keeper.load_folder(path / MODULE_FOLDER)
        file = path / rank_file(self.global_rank if same_ranks else 0)
        with explain_unpickling_errors(file):
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
        if fitting and not same_ranks:
            state[STATES_OF_RANKS] = _SavedRanks(path, manifest["world_size"])
        if fitting:
            normalize_counters(state["loops"]["fit_loop"])
        return state

    def _choose_checkpoint(self, wanted: Path) -> Path:
        """Verify the checkpoint, every rank its files; all ranks get the same path or the same error. A collective."""
        found, reasons = verification.find_intact(wanted, timeout=self.checkpoint_timeout)
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
        stages = {name: engine.zero_optimization_stage() for name, engine in self.engines.items()}
        saved, own = (manifest["engines"], _tensor_size(manifest)), (stages, self.tensor_parallel_size)
        if saved != own:
            raise CheckpointError(
                f"{path} was saved at the ZeRO stages {saved[0]} with tensor_parallel_size={saved[1]}, this run has"
                f" {own[0]} and {own[1]}. Resume it as it was saved (the number of ranks may be another one), or start"
                " a new run from exported weights (rlhfkit export, HFExport)."
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

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, unless it is the last intact one of its folder.

        While another is being written in the background, this waits until that one is complete, and does not happen if
        it cannot be written.
        """
        path, save = Path(filepath), self._background_save
        if not self.is_global_zero:
            return
        if save is None or not save.run_afterwards(lambda: self._remove(path)):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if not path.exists():
            return
        for other in path.parent.iterdir():
            if other == path or other.name.endswith((".tmp", ".old")):
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
    manifest = directory.read_manifest(checkpoint)
    if _tensor_size(manifest) > 1:
        raise CheckpointError(
            f"{checkpoint} was saved with tensor_parallel_size={_tensor_size(manifest)}: whole weights cannot be read"
            " from it. Resume it and export them (HFExport, save_pretrained)."
        )
    stage = manifest["engines"][child]
    folder = checkpoint / child
    if stage == 0:
        file = folder / _TAG / "mp_rank_00_model_states.pt"
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=False)["module"]
        return weights
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)
    return dict(weights)


def _tensor_size(manifest: Mapping[str, Any]) -> int:
    """Return the number of ranks over which the weights of a checkpoint are divided."""
    return int(manifest.get("tensor_parallel_size", 1))


def _create_parent(path: Path) -> None:
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def _state_outside_engines(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in checkpoint.items() if key != "optimizer_states"}


class _SavedRanks(Sequence[dict[str, Any]]):
    """What each rank has saved outside its engines."""

    def __init__(self, path: Path, world_size: int) -> None:
        self.path = path
        self.world_size = world_size

    def __len__(self) -> int:
        return self.world_size

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self.world_size:
            raise IndexError(rank)
        return torch.load(self.path / rank_file(rank), map_location="cpu", weights_only=True, mmap=True)


def rank_file(rank: int) -> str:
    """Return the name of the file with the state of a rank outside its engines."""
    return f"rank_{rank:05d}.pt"
