"""Checkpoints of one ZeRO stage in another: what DeepSpeed's universal format lacks for it.

Weights may be divided over tensor ranks, those saved and those loaded over other numbers. deepspeed 0.19.8 writes the
format from ZeRO 1 to 3 and reads it from ZeRO 1 to 3, but files of ZeRO 3 lack what ZeRO 1 and 2 read, and the other
way round; stage 0, where nothing is sharded, has neither. A converted folder has one folder per parameter with
``fp32.pt``, ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``, and ``optimizer_state.pt``.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.distributed import full_shape, tensor_part
from rlhfkit.strategies.checkpoint.momentum import as_adam

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter")
_MODEL_PREFIXES = ("", "zero_pp_rank_0_")  # stages 0 to 2, and 3
_MODEL_FILE = "mp_rank_00_model_states.pt"


def parameter_names(engine: "DeepSpeedEngine") -> list[list[str]]:
    """Names of the parameters of each group of an engine's optimizer, in the optimizer's order."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [[names[parameter] for parameter in group] for group in _groups(engine)]


def _groups(engine: "DeepSpeedEngine") -> list[list[nn.Parameter]]:
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.optimizer.param_groups]
        for number, part in enumerate(optimizer.fp16_groups):  # parts of the optimizer's groups
            groups[optimizer.sub_group_to_group_id[number]] += part
        return groups
    for name in ("bit16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in engine.basic_optimizer.param_groups]


def parameter_shapes(engine: "DeepSpeedEngine") -> dict[str, tuple[int, ...]]:
    """Full shapes of an engine's parameters by name."""
    return {name: tuple(full_shape(parameter)) for name, parameter in engine.module.named_parameters()}


def stage_0_optimizer(folder: Path, file: str = _MODEL_FILE) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole state that an engine has saved at stage 0, and its optimizer's own state dict inside."""
    saved: dict[str, Any] = torch.load(folder / file, map_location="cpu", weights_only=False, mmap=True)
    return saved, saved["optimizer"].get("optimizer_state_dict", saved["optimizer"])


def convert_stage_0(source: Path, target: Path, names: Sequence[Sequence[str]]) -> None:
    """Write a converted folder from a checkpoint of stage 0.

    Args:
        source: The engine's saved folder, with a file of each tensor rank.
        target: Of the new folder.
        names: Of parameters, by groups of the optimizer: the file numbers them.

    Raises:
        CheckpointError: If the optimizer was saved with other groups.
    """
    files = sorted(path.name for path in source.glob("mp_rank_*_model_states.pt"))
    parts = [_stage_0_parameters(source, file, names) for file in files]
    saved, optimizer = stage_0_optimizer(source)
    base = as_adam(optimizer)
    layout, wrapper = saved.get("universal_checkpoint_info", {}), saved["optimizer"]
    for name in parts[0]:
        folder = target / "zero" / name
        folder.mkdir(parents=True, exist_ok=True)
        for key in ("fp32", *_MOMENTS):
            whole = _joined(name, [part[name][key] for part in parts], layout)
            torch.save({"param": whole.clone()}, folder / f"{key}.pt")
        torch.save(parts[0][name].get("step", torch.zeros(())), folder / "step.pt")
    scale = {key: wrapper[key] for key in _SCALE if key in wrapper}
    common = {"param_groups": base["param_groups"], "ds_version": saved["ds_version"], "rlhfkit_loss_scale": scale}
    torch.save(common, target / "zero" / "optimizer_state.pt")
    for file in files:
        shutil.copy2(source / file, target)


def _stage_0_parameters(source: Path, file: str, names: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The main weight, the moments and the step of each parameter, or of its part, that one file of stage 0 has."""
    saved, optimizer = stage_0_optimizer(source, file)
    base = as_adam(optimizer)
    sizes = [len(group["params"]) for group in base["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise CheckpointError(
            f"{source}: the optimizer was saved with groups of {sizes} parameters, this run's has"
            f" {[len(group) for group in names]}: resume with the same groups."
        )
    flat = [name for group in names for name in group]
    weights = {name: saved["module"][name] for name in flat}
    if "fp32_groups" in saved["optimizer"]:
        weights = dict(
            zip(flat, [tensor for group in saved["optimizer"]["fp32_groups"] for tensor in group], strict=True)
        )
    found = {}
    for number, name in enumerate(flat):
        weight = weights[name].detach().float()
        moments = {key: torch.zeros_like(weight) for key in _MOMENTS}
        found[name] = {"fp32": weight, **moments, **base["state"].get(number, {})}
    return found


def _joined(name: str, parts: Sequence[Tensor], layout: Mapping[str, Any]) -> Tensor:
    """A tensor from those of all tensor ranks; ``layout`` has the patterns of names that DeepSpeed's AutoTP writes."""

    def listed(key: str) -> bool:
        return any(re.match(pattern, name) for pattern in layout.get(key, ()))

    if len(parts) == 1 or listed("tp_replicated_parameter_patterns"):
        return parts[0]
    return torch.cat(list(parts), dim=int(listed("parameter_with_row_parallelism_patterns")))


def complete(folder: Path) -> None:
    """Add to a converted folder what engines of other stages read: steps, the optimizer's part, the model's file."""
    file = folder / "zero" / "optimizer_state.pt"
    common = torch.load(file, map_location="cpu", weights_only=False)
    parameters = [path.parent for path in (folder / "zero").rglob("fp32.pt")]
    inner = common.get("optimizer_state_dict")
    if inner is None:
        step = next((torch.load(p / "step.pt", weights_only=False) for p in parameters if (p / "step.pt").exists()), 0)
        groups = common["param_groups"]
        common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    else:
        step = inner["state"][0]["step"]
        for parameter in parameters:
            if not (parameter / "step.pt").exists():
                torch.save(step, parameter / "step.pt")
    import deepspeed

    common.setdefault("ds_version", deepspeed.__version__)
    torch.save(common, file)
    for prefix, other in (_MODEL_PREFIXES, _MODEL_PREFIXES[::-1]):
        for path in list(folder.glob(f"{prefix}mp_rank_*_model_states.pt")):  # one of each tensor rank
            copy = folder / path.name.replace(f"{prefix}mp_rank", f"{other}mp_rank")
            if not copy.exists():
                shutil.copy2(path, copy)


def reshape(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    """Give the tensors of a parameter their shape: those of ZeRO 3 are flat, and bare."""
    for key in ("fp32", *_MOMENTS):
        file = folder / "zero" / name / f"{key}.pt"
        if file.exists():
            saved = torch.load(file, map_location="cpu", weights_only=False)
            if torch.is_tensor(saved):
                torch.save({"param": saved.view(shape)}, file)


def load_stage_0(engine: "DeepSpeedEngine", folder: Path) -> None:
    """Load a converted folder into an engine at stage 0: weights, optimizer state, counters."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for parameter, weight, state in _slots(engine):
        saved = folder / "zero" / names[parameter]
        for key, tensor in {"fp32": weight, **{key: state[key] for key in _MOMENTS}}.items():
            whole = torch.load(saved / f"{key}.pt", map_location="cpu", weights_only=False)["param"]
            tensor.data.copy_(_own_part(parameter, whole))
        if weight is not parameter:
            parameter.data.copy_(weight.data)
        step = torch.load(saved / "step.pt", map_location="cpu", weights_only=False)
        state["step"] = step.clone() if torch.is_tensor(step) else torch.tensor(float(step))
    model = torch.load(folder / _MODEL_FILE, map_location="cpu", weights_only=False, mmap=True)
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, model.get(name, getattr(engine, name)))


def _own_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """What this tensor rank has of a tensor of the shape of a whole parameter."""
    part = tensor_part(parameter)
    if part is None:
        return whole
    return torch.split(whole, list(part.sizes), part.dimension)[dist.get_rank(part.group)]


def _slots(engine: "DeepSpeedEngine") -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
    """Each trained parameter of an engine at stage 0, its main weight, and its state with moments, made if missing."""
    optimizer, groups = engine.optimizer, _groups(engine)
    if hasattr(optimizer, "fp32_groups_flat"):
        raise CheckpointError(
            "DeepSpeed's fused optimizer at ZeRO stage 0 cannot take over the state of another stage: resume at ZeRO"
            " stage 1, which computes the same (RLHFDeepSpeedStrategy(stage=1))."
        )
    mains = getattr(optimizer, "fp32_groups", groups)
    for parameters, weights in zip(groups, mains, strict=True):
        for parameter, weight in zip(parameters, weights, strict=True):
            state = engine.basic_optimizer.state[weight]
            for key in _MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(weight)
            yield parameter, weight, state


def load_loss_scale(engine: "DeepSpeedEngine", common: Mapping[str, Any]) -> None:
    """Continue with the saved loss scale of fp16, where DeepSpeed does not load it: from stage 0, and at stage 0."""
    scaler: Any = common.get("loss_scaler")
    saved = {key: getattr(scaler, key, None) for key in _SCALE} if scaler is not None else {}
    saved |= common.get("rlhfkit_loss_scale", {})
    if not engine.fp16_enabled():
        return
    own: Any = engine.optimizer.loss_scaler if engine.zero_optimization() else engine.optimizer.loss_scale_config
    for key, value in saved.items():
        if value is not None and hasattr(own, key):
            setattr(own, key, value)
