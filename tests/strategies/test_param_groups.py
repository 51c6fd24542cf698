"""Parameter groups go to the one child that owns them; ambiguous cases are errors that say what to do.

Covers strategies/deepspeed/param_groups.py and the configuration in deepspeed/engines.py.
"""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from rlhfkit.strategies.deepspeed.engines import engine_config, split_optimizer
from rlhfkit.strategies.deepspeed.param_groups import groups_by_child


def pair() -> nn.ModuleDict:
    """A policy and a critic."""
    return nn.ModuleDict({"policy": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "critic": nn.Linear(2, 1)})


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_split_optimizer_steps_its_part_only_and_follows_the_schedule_of_the_whole() -> None:
    module = pair()
    weights, biases = ([p for p in module.policy.parameters() if p.ndim == ndim] for ndim in (2, 1))
    groups = [{"params": one} for one in (weights, module.critic.parameters(), biases)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.5, 0.6))
    owned = groups_by_child(module, optimizer)
    first, second, third = optimizer.param_groups
    assert [[id(group) for group in own] for own in owned.values()] == [[id(first), id(third)], [id(second)]]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    part = split_optimizer(optimizer, owned["critic"])
    assert type(part) is torch.optim.AdamW
    assert part.param_groups[0]["betas"] == (0.5, 0.6)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    part.step()
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"critic.weight", "critic.bias"}
    assert not optimizer.state
    schedule.step()
    assert part.param_groups[0]["lr"] == 0.0


def test_groups_that_no_child_owns_alone_are_refused_and_frozen_parameters_are_not_missed() -> None:
    module, sharing, outside = pair(), pair(), nn.Module()
    sharing["other"] = nn.Sequential(sharing.policy[0])
    outside.temperature = nn.Parameter(torch.ones(1))
    for one, trained, problem in (
        (module, module, r"group 0 .*spans the children \['critic', 'policy'\]"),
        (sharing, sharing.policy, r"'policy\.0\.weight', which is shared by .*'other'"),
        (outside, outside, "'temperature', which is outside every child"),
        (module, module.policy[0], r"2 parameter\(s\) of 'policy' .*1\.weight, 1\.bias"),
    ):
        with pytest.raises(MisconfigurationException, match=problem):
            groups_by_child(one, torch.optim.SGD(trained.parameters(), lr=1.0))
    module.policy[1].requires_grad_(False)
    assert list(groups_by_child(module, torch.optim.SGD(module.policy[0].parameters(), lr=1.0))) == ["policy"]


def test_engine_config_merges_overrides_without_touching_the_base() -> None:
    base = {
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "gradient_clipping": 5.0,
        "bf16": {"enabled": True},
    }
    config = engine_config(base, {"zero_optimization": {"stage": 1}}, trainable=True)
    assert config["zero_optimization"] == {"stage": 1, "overlap_comm": False}
    assert config["gradient_clipping"] == 0.0
    assert config["managed_gradient_accumulation"] is False
    assert base["zero_optimization"] == {"stage": 3, "overlap_comm": True}


def test_frozen_children_are_sharded_at_stage_3_only() -> None:
    base = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert engine_config(base, {}, trainable=False)["zero_optimization"] == {"stage": 3}
    assert "zero_optimization" not in engine_config(base, {"zero_optimization": {"stage": 0}}, trainable=False)
    plain = engine_config({"zero_optimization": {"stage": 2}}, {}, trainable=False)
    assert "zero_optimization" not in plain
