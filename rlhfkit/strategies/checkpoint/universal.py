"""Resume with another number of ranks, through a copy of the checkpoint in DeepSpeed's universal format.

Optimizers that keep one momentum, as Muon and SGD do, are written as Adam is: the momentum stands in the place of the
first moment while a checkpoint is converted, and their groups are marked.
"""

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import write_owner
from rlhfkit.strategies.checkpoint import directory
from rlhfkit.strategies.checkpoint.slow_steps import Phases, on_rank_zero, run_in_phases

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# The optimizer state that deepspeed 0.19.8 converts (ds_to_universal.py, extract_zero_shards and that of stage 3).
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
_MOMENTUM = "momentum_buffer"  # torch's name
_MARK = "rlhfkit_momentum"


@contextmanager
def converted(path: Path, names: Iterable[str], manifest: Mapping[str, Any], *, timeout: float) -> Iterator[Path]:
    """Convert engines of a checkpoint at ZeRO stage 1 to 3 for any number of ranks, inside the context. A collective.

    The ranks write a copy of the same size into a temporary folder beside the checkpoint, which is only read: each
    takes an equal share of the saved files apart, then puts an equal share of the parameters together. Raises
    CheckpointError on all ranks if DeepSpeed cannot convert it.
    """
    doing = f"converting {path}"
    folder = on_rank_zero(lambda: _create_folder(path), timeout=timeout, doing=doing)
    try:
        run_in_phases(lambda phases: _convert(path, folder, names, manifest, phases), timeout=timeout, doing=doing)
        yield folder
        if dist.is_initialized():
            dist.barrier()  # until all ranks have read it
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                directory.remove(folder)


def _create_folder(path: Path) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.universal-", suffix=".tmp", dir=path.parent))
        write_owner(folder)
    except OSError as error:
        raise CheckpointError(
            f"Resuming {path} with another number of ranks needs room beside it for a converted copy: {error}"
        ) from error
    return folder


def _convert(path: Path, folder: Path, names: Iterable[str], manifest: Mapping[str, Any], phases: Phases) -> None:
    """Convert this rank's share of each engine."""
    try:
        for name in names:
            (tag,) = (entry.name for entry in (path / name).iterdir() if entry.is_dir())
            source, target = path / name / tag, folder / name / tag
            if _MOMENTUM in _require_convertible(path, name, source):
                with_moments = folder / f"{name}.moments" / tag
                _write_momentum_as_adam(source, with_moments, phases)
                source = with_moments
            _convert_engine(source, target, phases)
    except Exception as error:
        if phases.interrupted or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"DeepSpeed could not convert {path} for another number of ranks ({type(error).__name__}: {error})."
            f" Resume with {manifest['world_size']} rank(s), or start a new run from exported weights (rlhfkit export)."
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


def _require_convertible(path: Path, name: str, folder: Path) -> set[str]:
    """Return the names of an optimizer's states; CheckpointError if they cannot be converted."""
    file = min(folder.glob("*_optim_states.pt"))
    state = torch.load(file, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]
    base = state.get("base_optimizer_state") or state["optimizer_state_dict"]  # stage 3
    kept = [set(entry) for entry in base["state"].values()]
    names = {key.partition(".")[0] for keys in kept for key in keys}
    if not kept or any(keys not in (_ADAM_STATE, {_MOMENTUM}) for keys in kept):
        raise CheckpointError(
            f"{path}: the optimizer of '{name}' keeps {sorted(names) or 'nothing'}. The number of ranks changes only"
            f" for optimizers that keep {sorted(_ADAM_STATE)} of a parameter, such as AdamW, or a {_MOMENTUM} alone,"
            " such as Muon. Resume with the ranks that saved it, or start a new run from exported weights (rlhfkit"
            " export)."
        )
    return names


def _write_momentum_as_adam(source: Path, target: Path, phases: Phases) -> None:
    """Write a copy of an engine's folder with Adam's states; weights are linked."""
    if phases.rank == 0:
        target.mkdir(parents=True)
        for file in source.iterdir():
            if not file.name.endswith("_optim_states.pt"):
                (target / file.name).symlink_to(file)
    phases.gather([])
    for file in phases.share(sorted(source.glob("*_optim_states.pt"))):
        saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
        wrapper = saved["optimizer_state_dict"]
        key = "base_optimizer_state" if wrapper.get("base_optimizer_state") else "optimizer_state_dict"  # stage 3
        wrapper[key] = _as_adam(wrapper[key])
        torch.save(saved, target / file.name)
    phases.gather([])


def _as_adam(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with Adam's states in place of momentum."""
    states: Mapping[Any, dict[str, Any]] = base["state"]
    # DeepSpeed has one counter at stage 3, and takes the first that it finds.
    step = next((state["step"] for state in states.values() if "step" in state), torch.tensor(0.0))
    groups = [
        {**group, _MARK: any(_MOMENTUM in states.get(number, {}) for number in group["params"])}
        for group in base["param_groups"]
    ]
    renamed = {number: _renamed(state, step) for number, state in states.items()}
    return {**base, "state": renamed, "param_groups": groups}


def _renamed(state: dict[str, Any], step: Any) -> dict[str, Any]:
    if _MOMENTUM not in state:
        return state
    moment: Tensor = state[_MOMENTUM]
    return {"step": step, "exp_avg": moment, "exp_avg_sq": moment.new_zeros(()).expand_as(moment)}


def load_converted(engine: "DeepSpeedEngine", folder: Path, tag: str) -> None:
    """Load weights, optimizer state and hyperparameters of one engine from its converted folder."""
    _load_universal(engine, folder, tag)
    file = folder / tag / "zero" / "optimizer_state.pt"
    common = torch.load(file, map_location="cpu", weights_only=False)
    groups = common["param_groups"]
    # deepspeed 0.19.8 at stage 3 gives all groups the settings of the first, and one shared step counter that each
    # group then increments.
    for own, saved in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        for key in own.keys() - saved.keys():
            del own[key]
        own.update({key: value for key, value in saved.items() if key != "params"})
    _place_steps(engine)
    _restore_momentum(engine)
    _load_buffers(engine, folder / tag)


def _place_steps(engine: "DeepSpeedEngine") -> None:
    """Give each state a step counter of its own, where the kernels of its group read it.

    deepspeed 0.19.8 leaves the counters on the CPU, one for many parameters. Fused and capturable kernels take the
    address of a float32 counter on the parameter's device; on a GPU another one is an illegal memory access.
    """
    base = engine.basic_optimizer
    for number, group in enumerate(base.param_groups):
        on_device = group.get("fused") or group.get("capturable")
        for tensor in _updated_tensors(engine, number):
            state = base.state.get(tensor, {})
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                state["step"] = step.to(tensor.device, torch.float32, copy=True) if on_device else step.clone()


def _restore_momentum(engine: "DeepSpeedEngine") -> None:
    """Turn the first moments of marked groups into momentum."""
    base: Any = engine.basic_optimizer
    for number, group in enumerate(base.param_groups):
        if group.pop(_MARK, False):
            for tensor in _updated_tensors(engine, number):
                base.state[tensor] = {_MOMENTUM: base.state[tensor]["exp_avg"]}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False  # it would keep the second moments


def _updated_tensors(engine: "DeepSpeedEngine", number: int) -> list[Tensor]:
    """Return what the optimizer updates of a group; at stage 3 DeepSpeed puts it into the group for each step only."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        return [flat for part, flat in flats if optimizer.sub_group_to_group_id[part] == number]
    return list(engine.basic_optimizer.param_groups[number]["params"])


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
