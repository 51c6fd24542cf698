"""Resume with another number of ranks, through a temporary copy in DeepSpeed's universal checkpoint format."""

import argparse
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.cleanup import write_owner
from rlhfkit.strategies.checkpoint.slow_steps import on_rank_zero

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# The optimizer state that deepspeed 0.19.8 converts (ds_to_universal.py, extract_zero_shards and that of stage 3).
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


@contextmanager
def converted(path: Path, names: Iterable[str], manifest: Mapping[str, Any], *, timeout: float) -> Iterator[Path]:
    """Convert the sharded engines of a checkpoint for any number of ranks, inside the context. A collective.

    Rank 0 writes a copy of the same size into a temporary folder beside the checkpoint, which is only read. Raises
    CheckpointError if DeepSpeed cannot convert it.
    """
    folder = on_rank_zero(lambda: _convert(path, names, manifest), timeout=timeout, doing=f"converting {path}")
    try:
        yield folder
        if dist.is_initialized():
            dist.barrier()  # until all ranks have read it
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _convert(path: Path, names: Iterable[str], manifest: Mapping[str, Any]) -> Path:
    from deepspeed.checkpoint.ds_to_universal import main

    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.universal-", suffix=".tmp", dir=path.parent))
    except OSError as error:
        raise CheckpointError(
            f"Resuming {path} with another number of ranks needs room beside it for a converted copy: {error}"
        ) from error
    write_owner(folder)
    try:
        for name in names:
            (tag,) = (entry.name for entry in (path / name).iterdir() if entry.is_dir())
            _require_adam(path, name, path / name / tag)
            arguments = argparse.Namespace(
                input_folder=str(path / name / tag),
                output_folder=str(folder / name / tag),
                num_extract_workers=1,  # no fork: this process has threads and sockets
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
            os.makedirs(arguments.output_folder)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                main(arguments)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"DeepSpeed could not convert {path} for another number of ranks ({type(error).__name__}: {error}). Resume"
            f" with {manifest['world_size']} rank(s), or start a new run from exported weights."
        ) from error
    return folder


def _require_adam(path: Path, name: str, folder: Path) -> None:
    """Raise CheckpointError if DeepSpeed cannot convert the state of the optimizer."""
    file = min(folder.glob("*_optim_states.pt"))
    state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]  # stage 3
    found = {key for entry in base["state"].values() for key in entry}
    if found != _ADAM_STATE:
        raise CheckpointError(
            f"{path}: the optimizer of '{name}' keeps {sorted(found) or 'nothing'}. DeepSpeed changes the number of"
            f" ranks only of optimizers that keep {sorted(_ADAM_STATE)}, such as AdamW. Resume with the ranks that"
            " saved it, or start a new run from exported weights."
        )


def load_converted(engine: "DeepSpeedEngine", folder: Path, tag: str) -> None:
    """Load weights, optimizer state and hyperparameters of one engine from its converted folder."""
    engine._config.load_universal_checkpoint = True
    try:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise CheckpointError(f"DeepSpeed found nothing to load in {folder}.")
    file = folder / tag / "zero" / "optimizer_state.pt"
    groups = torch.load(file, map_location="cpu", weights_only=False)["param_groups"]
    # deepspeed 0.19.8 at stage 3 gives all groups the settings of the first, and one shared step counter that each
    # group then increments.
    for own, saved in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        own.update({key: value for key, value in saved.items() if key != "params"})
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    _load_buffers(engine, folder / tag)


def _load_buffers(engine: "DeepSpeedEngine", folder: Path) -> None:
    """Load persistent buffers, which DeepSpeed leaves out; they are equal on all ranks."""
    module = engine.module
    names = {name for name, _ in module.named_buffers()} & set(module.state_dict(keep_vars=True))
    if not names:
        return
    file = min(folder.glob("*model_states.pt"))
    saved = torch.load(file, map_location="cpu", weights_only=False)["module"]
    for name, buffer in module.named_buffers():
        if name in names and name in saved:
            buffer.copy_(saved[name])


def require_common_position(path: Path, rank_files: Sequence[Path]) -> None:
    """Raise CheckpointError if the data loaders cannot continue with another number of ranks.

    Between epochs they can. Inside an epoch, the loaders of all ranks must be at the same position of the same data;
    batches that belong to one rank, such as the rest of an iteration's samples, would be lost or repeated.
    """
    # Mapped, as the files may hold large tensors of callbacks.
    states = [torch.load(file, map_location="cpu", weights_only=False, mmap=True) for file in rank_files]
    fits = [state["loops"]["fit_loop"] for state in states]
    progress = fits[0]["epoch_loop.batch_progress"]
    if progress["is_last_batch"] or progress["current"]["ready"] == 0:
        return
    positions = [fit["state_dict"].get("combined_loader") for fit in fits]
    if not positions[0] or any(not _equal(positions[0], position) for position in positions[1:]):
        why = "differ between ranks" if positions[0] else "do not say where they stood"
        raise CheckpointError(
            f"{path} was saved by {len(rank_files)} rank(s) inside an epoch, and its data loaders {why}: another number"
            f" of ranks would lose or repeat data. Resume with {len(rank_files)} rank(s), or from a checkpoint of the"
            " end of an epoch."
        )


def _equal(first: Any, second: Any) -> bool:
    """Whether nested plain data with tensors is equal."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
