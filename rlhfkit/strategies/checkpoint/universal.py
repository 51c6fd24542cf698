"""Resume on other ranks, at another ZeRO stage or tensor size, through a copy in DeepSpeed's universal format."""

import argparse
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.cleanup import write_owner
from rlhfkit.strategies.checkpoint import momentum, stages
from rlhfkit.strategies.checkpoint.momentum import MOMENTUM
from rlhfkit.strategies.checkpoint.slow_steps import Phases, on_rank_zero, run_in_phases

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# The optimizer state that deepspeed 0.19.8 converts (ds_to_universal.py, extract_zero_shards and that of stage 3).
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}


@contextmanager
def converted(
    path: Path,
    names: Iterable[str],
    manifest: Mapping[str, Any],
    *,
    timeout: float,
    engines: Mapping[str, "DeepSpeedEngine"] | None = None,
) -> Iterator[Path]:
    """Convert engines of a checkpoint for any number of ranks, inside the context. A collective.

    With ``engines``, those that will load it, for any ZeRO stage and any number of tensor ranks too.

    The ranks write a copy of the same size into a temporary folder beside the checkpoint, which is only read: each
    takes an equal share of the saved files apart, then puts an equal share of the parameters together. Raises
    CheckpointError on all ranks if DeepSpeed cannot convert it.
    """
    doing = f"converting {path}"
    folder = on_rank_zero(lambda: _create_folder(path), timeout=timeout, doing=doing)
    targets = {
        name: (stages.parameter_names(engine), stages.parameter_shapes(engine))
        for name, engine in (engines or {}).items()
    }
    try:
        run_in_phases(
            lambda phases: _convert(path, folder, names, manifest, targets, phases), timeout=timeout, doing=doing
        )
        yield folder
        if dist.is_initialized():
            dist.barrier()  # until all ranks have read it
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _create_folder(path: Path) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.universal-", suffix=".tmp", dir=path.parent))
        write_owner(folder)
    except OSError as error:
        raise CheckpointError(
            f"Resuming {path} with another number of ranks needs room beside it for a converted copy: {error}"
        ) from error
    return folder


def _convert(
    path: Path,
    folder: Path,
    names: Iterable[str],
    manifest: Mapping[str, Any],
    targets: Mapping[str, tuple[list[list[str]], dict[str, tuple[int, ...]]]],
    phases: Phases,
) -> None:
    """Convert this rank's share of each engine; ``targets`` are names and shapes of parameters that will load it."""
    try:
        for name in names:
            (tag,) = (entry.name for entry in (path / name).iterdir() if entry.is_dir())
            source, target, stage = path / name / tag, folder / name / tag, manifest["engines"][name]
            if MOMENTUM in _require_convertible(path, name, source, stage) and stage > 0:
                with_moments = folder / f"{name}.moments" / tag
                momentum.rewrite(source, with_moments, phases)
                source = with_moments
            if stage > 0:
                _convert_engine(source, target, phases)
            elif phases.rank == 0:
                stages.convert_stage_0(source, target, targets[name][0])
            if name in targets:
                if phases.rank == 0:
                    stages.complete(target)
                phases.gather([])
                for parameter, shape in phases.share(sorted(targets[name][1].items())):
                    stages.reshape(target, parameter, shape)
                phases.gather([])
    except Exception as error:
        if phases.interrupted or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"DeepSpeed could not convert {path} for another number of ranks or another ZeRO stage"
            f" ({type(error).__name__}: {error}). Resume with {manifest['world_size']} rank(s) at the same stages"
            f" ({manifest['engines']}), or start a new run from exported weights (rlhfkit export)."
        ) from error


class _MergedError(Exception):
    """Ends the converter on ranks other than 0 after the work that is shared."""


def _convert_engine(source: Path, target: Path, phases: Phases) -> None:
    """Run DeepSpeed's converter on every rank; the lists of work that it makes are dealt to the ranks.

    Its two lists, in ``_do_parallel_work`` of deepspeed 0.19.8, are files to take apart and parameters to put together.
    What follows is little, and rank 0 does it.
    """
    from deepspeed.checkpoint import ds_to_universal

    lists_done = 0

    def do_share(do_work: Callable[[Any], Any], work: Iterable[Any], num_workers: int) -> list[Any]:
        nonlocal lists_done
        results = phases.gather([do_work(item) for item in phases.share(sorted(work, key=str))])
        lists_done += 1
        if lists_done == 2 and phases.rank != 0:
            raise _MergedError
        return results

    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # no fork: this process has threads and sockets
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=False,  # of a divided model DeepSpeed also lists frozen weights, which are not in the files
        inject_missing_state=False,
    )
    os.makedirs(target, exist_ok=True)
    original = ds_to_universal._do_parallel_work
    ds_to_universal._do_parallel_work = do_share
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
    except _MergedError:
        pass
    finally:
        ds_to_universal._do_parallel_work = original


def _require_convertible(path: Path, name: str, folder: Path, stage: int) -> set[str]:
    """The names of an optimizer's states; CheckpointError if they cannot be converted."""
    if stage == 0:
        base = stages.stage_0_optimizer(folder)[1]
    else:
        file = min(folder.glob("*_optim_states.pt"))
        state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
        base = state.get("base_optimizer_state") or state["optimizer_state_dict"]  # stage 3
    kept = [set(entry) for entry in base["state"].values()]
    found = {key.partition(".")[0] for keys in kept for key in keys}
    if not kept or any(keys not in (_ADAM_STATE, {MOMENTUM}) for keys in kept):
        raise CheckpointError(
            f"{path}: the optimizer of '{name}' keeps {sorted(found) or 'nothing'}. The number of ranks or the stage"
            f" changes only for optimizers that keep {sorted(_ADAM_STATE)} of a parameter, such as AdamW, or a"
            f" {MOMENTUM} alone, such as Muon. Resume with the ranks and the stage that saved it, or start a new run"
            " from exported weights (rlhfkit export)."
        )
    return found


def load_converted(engine: "DeepSpeedEngine", folder: Path, tag: str) -> None:
    """Load weights, optimizer state and hyperparameters of one engine from its converted folder."""
    if engine.zero_optimization():
        _load_universal(engine, folder, tag)
    else:
        stages.load_stage_0(engine, folder / tag)
    file = folder / tag / "zero" / "optimizer_state.pt"
    common = torch.load(file, map_location="cpu", weights_only=False)
    stages.load_loss_scale(engine, common)
    groups = common["param_groups"]
    # deepspeed 0.19.8 at stage 3 gives all groups the settings of the first, and one shared step counter that each
    # group then increments.
    for own, saved in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        for key in own.keys() - saved.keys():
            del own[key]
        own.update({key: value for key, value in saved.items() if key != "params"})
    _place_steps(engine)
    momentum.restore(engine)
    _load_buffers(engine, folder / tag)


def _place_steps(engine: "DeepSpeedEngine") -> None:
    """Give each state a step counter of its own, where the kernels of its group read it.

    deepspeed 0.19.8 leaves the counters on the CPU, one for many parameters. Fused and capturable kernels take the
    address of a float32 counter on the parameter's device; on a GPU another one is an illegal memory access.
    """
    base = engine.basic_optimizer
    for number, group in enumerate(base.param_groups):
        on_device = group.get("fused") or group.get("capturable")
        for tensor in momentum.updated_tensors(engine, number):
            state = base.state.get(tensor, {})
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                state["step"] = step.to(tensor.device, torch.float32, copy=True) if on_device else step.clone()


def _load_universal(engine: "DeepSpeedEngine", folder: Path, tag: str) -> None:
    engine._config.load_universal_checkpoint = True
    try:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag, load_lr_scheduler_states=False)
    finally:
        engine._config.load_universal_checkpoint = False
    if loaded is None:
        raise CheckpointError(f"DeepSpeed found nothing to load in {folder}.")


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
