"""Optimizers that keep one momentum, as Muon and SGD do, in DeepSpeed's universal format of Adam's two moments.

The momentum stands in the place of the first moment while a checkpoint is converted, and groups that have it are
marked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhfkit.strategies.checkpoint.slow_steps import Phases

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOMENTUM = "momentum_buffer"
"""What torch's optimizers call it."""
_MARK = "rlhfkit_momentum"


def as_adam(base: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with Adam's states in place of momentum; without momentum it is returned as it is."""
    states: Mapping[Any, dict[str, Any]] = base["state"]
    if not any(MOMENTUM in state for state in states.values()):
        return dict(base)
    # DeepSpeed has one counter at stage 3, and takes the first that it finds.
    step = next((state["step"] for state in states.values() if "step" in state), torch.tensor(0.0))
    groups = [
        {**group, _MARK: any(MOMENTUM in states.get(number, {}) for number in group["params"])}
        for group in base["param_groups"]
    ]
    renamed = {number: _renamed(state, step) for number, state in states.items()}
    return {**base, "state": renamed, "param_groups": groups}


def _renamed(state: dict[str, Any], step: Any) -> dict[str, Any]:
    if MOMENTUM not in state:
        return state
    moment: Tensor = state[MOMENTUM]
    return {"step": step, "exp_avg": moment, "exp_avg_sq": moment.new_zeros(()).expand_as(moment)}


def rewrite(source: Path, target: Path, phases: Phases) -> None:
    """Write a copy of an engine's folder from ZeRO 1 to 3 with Adam's states; weights are linked."""
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
        wrapper[key] = as_adam(wrapper[key])
        torch.save(saved, target / file.name)
    phases.gather([])


def restore(engine: "DeepSpeedEngine") -> None:
    """Turn the first moments of marked groups of an engine that has loaded a converted folder into momentum."""
    base: Any = engine.basic_optimizer
    for number, group in enumerate(base.param_groups):
        if group.pop(_MARK, False):
            for tensor in updated_tensors(engine, number):
                base.state[tensor] = {MOMENTUM: base.state[tensor]["exp_avg"]}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False  # it would keep the second moments


def updated_tensors(engine: "DeepSpeedEngine", number: int) -> list[Tensor]:
    """Return what the optimizer updates of a group; at stage 3 DeepSpeed puts it into the group for each step only."""
    optimizer: Any = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        return [flat for part, flat in flats if optimizer.sub_group_to_group_id[part] == number]
    return list(engine.basic_optimizer.param_groups[number]["params"])
