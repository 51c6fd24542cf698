"""Saving and loading runs whose weights live in DeepSpeed engines: engine shards, state per rank, bitwise resume."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import writing
from rlhfkit.checkpoints.progress import settle
from rlhfkit.distributed import gather_objects
from rlhfkit.strategies.checkpoint import directory, universal
from rlhfkit.strategies.deepspeed.engines import EngineOptimizer
from rlhfkit.strategies.deepspeed.zero3 import load_full_state

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_TAG = "checkpoint"


class EngineCheckpoints(DeepSpeedStrategy):
    """The checkpoint half of :class:`~rlhfkit.strategies.strategy.RLHFDeepSpeedStrategy`.

    A checkpoint is a directory::

        step=100.ckpt/
            manifest.json          files, sizes, SHA-256, number of ranks
            policy/checkpoint/...  DeepSpeed's shards of one engine: weights and optimizer
            rank_00000.pt          everything else of one rank: loops, callbacks, loaders, schedulers, random state

    It is written to ``step=100.ckpt.tmp`` and renamed when complete, on a file system that all ranks share. Frozen
    children are not in it. Random states are per rank, because loaders are; they and the exact position in the run come
    from :class:`~rlhfkit.checkpoints.ExactResume`, which the strategy attaches.
    """

    saves_every_rank = True
    """Each rank finds its own random state and loaders in a checkpoint."""

    engines: dict[str, "DeepSpeedEngine"]
    frozen_engines: dict[str, "DeepSpeedEngine"]
    _frozen: set[str]
    _accumulating: set[str]
    checkpoint_timeout: float = 7200.0
    """Seconds that ranks wait while rank 0 verifies a checkpoint, or converts it for another number of ranks."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a run. All ranks must call it.

        Args:
            checkpoint: Lightning's dictionary.
            filepath: Directory to create; rank 0's value counts.
            storage_options: Not supported.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes directories itself; storage_options are not supported.")
        path = Path(self.broadcast(str(filepath)))
        try:
            self._write(path, checkpoint)
        except CheckpointError:
            if self.is_global_zero:
                shutil.rmtree(directory.temporary(path), ignore_errors=True)
            raise
        self.barrier()

    def _write(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        with writing(path):
            self._write_files(path, checkpoint)
            self.barrier()  # all files exist
            folder = directory.temporary(path)
            names = directory.files_in(folder)
            records = gather_objects(directory.seal(folder, names[self.global_rank :: self.world_size]))
            if self.is_global_zero:
                self._publish(path, records, checkpoint)

    def _write_files(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        if self.is_global_zero:
            directory.start(path)
        self.barrier()
        folder = directory.temporary(path)
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

    def _publish(self, path: Path, records: list[dict[str, Any]], checkpoint: Mapping[str, Any]) -> None:
        about = {
            "saved_at": time.time(),
            "world_size": self.world_size,
            "global_step": checkpoint.get("global_step"),
            "engines": {name: engine.zero_optimization_stage() for name, engine in self.engines.items()},
        }
        directory.publish(path, {name: record for part in records for name, record in part.items()}, about)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a run into the engines; a damaged checkpoint is replaced by the newest intact older one, with a warning.

        Args:
            checkpoint_path: A directory that :meth:`save_checkpoint` wrote.
            weights_only: False lets pickled objects of callbacks or data modules be loaded; they can run code.
                Lightning does not pass this on for strategies that restore after set-up, so None means True.

        Raises:
            CheckpointError: When nothing intact is found, when training resumes with other engines or stages, or with
                another number of ranks where DeepSpeed or the data cannot be dealt anew.
        """
        assert self.lightning_module is not None
        path = self._agree_on(Path(checkpoint_path))
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
        try:
            state = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
        except Exception as error:
            if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
                raise
            raise CheckpointError(
                f"{file} holds objects of a callback, data module or hyperparameter that are not plain data. Store"
                " plain numbers, strings, lists, dictionaries and tensors instead."
            ) from error
        if fitting:
            settle(state["loops"]["fit_loop"])  # also for another number of ranks, which has other batches per epoch
        return state

    def _agree_on(self, wanted: Path) -> Path:
        """Rank 0 verifies and chooses; all ranks load the same checkpoint or raise the same error."""
        found, complaints = universal.on_rank_zero(
            lambda: directory.usable(wanted), timeout=self.checkpoint_timeout, doing=f"verifying {wanted}"
        )
        if found != wanted:
            rank_zero_warn(
                f"The checkpoint {wanted} is damaged ({' '.join(complaints)}) Loading the newest intact one saved"
                f" before it: {found}. {directory.lost_steps(wanted, found)}"
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
        """Refuse what cannot be dealt anew, and say what is not restored."""
        universal.on_rank_zero(
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
        """Full weights for validation, test and prediction, whatever the stage and number of ranks they came from."""
        assert self.lightning_module is not None
        for name in manifest["engines"]:
            child = self.lightning_module.get_submodule(name)
            state = saved_weights(path, name) if self.is_global_zero else {}
            load_full_state(getattr(child, "module", child), state, from_rank_zero=self.world_size > 1)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State outside the engines and frozen children: metrics, buffers. The engines save their own."""
        module = self.lightning_module
        assert module is not None
        skip = tuple(f"{name}." for name in {*self.engines, *self._frozen})
        hidden: dict[str, nn.Module | None] = {name: module._modules[name] for name in {*self.engines, *self._frozen}}
        order = list(module._modules)
        try:
            for name in hidden:
                module._modules[name] = None  # do not materialise sharded weights only to drop them
            return {key: value for key, value in module.state_dict().items() if not key.startswith(skip)}
        finally:
            for name in order:
                if name in hidden:
                    module._modules[name] = hidden[name]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """State outside the engines; the engines have loaded theirs in :meth:`load_checkpoint`."""
        assert self.lightning_module is not None
        if checkpoint.get("state_dict"):
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Empty: the engines save their shards."""
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
                directory.verify(other, checksums=False)
            except (CheckpointError, OSError):
                continue
            directory.remove(path)
            return
        rank_zero_warn(f"Not deleting {path}: it is the only complete checkpoint in its folder.")


def saved_weights(checkpoint: Path, child: str) -> dict[str, Tensor]:
    """The full fp32 (stage 0: training precision) weights of one child in a checkpoint, without any process group."""
    stage = directory.read_manifest(checkpoint)["engines"][child]
    folder = checkpoint / child
    if stage == 0:
        file = folder / _TAG / "mp_rank_00_model_states.pt"
        return torch.load(file, map_location="cpu", weights_only=False)["module"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=_TAG)


def rank_file(rank: int) -> str:
    """Name of the file in a checkpoint that holds everything of a rank that is not in an engine."""
    return f"rank_{rank:05d}.pt"
