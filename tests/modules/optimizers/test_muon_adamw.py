"""Muon for matrices with AdamW for the rest, against torch's two optimizers; resumed: ``test_step_properties.py``."""

from typing import Any

import pytest
import torch
from torch import nn

from rlhfkit.modules.optimizers import Muon


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def groups(net: nn.Sequential) -> list[dict[str, Any]]:
    matrices = [net[0].weight, net[2].weight]
    others = [one for one in net.parameters() if not any(one is matrix for matrix in matrices)]
    return [{"params": others, "lr": 3e-2}, {"params": matrices, "kind": "matrices"}]


def backward(net: nn.Sequential, step: int) -> None:
    net.zero_grad()
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    net(inputs).square().sum().backward()


def test_each_part_takes_the_steps_of_torchs_own_optimizer() -> None:
    ours, theirs = network(), network()
    both = Muon(groups(ours), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6, momentum=0.8)
    others, matrices = (group["params"] for group in groups(theirs))
    adamw = torch.optim.AdamW(others, lr=3e-2, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6)
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        both.step()
        adamw.step()
        muon.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parts_of_matrices_are_refused_also_when_a_strategy_has_replaced_them() -> None:
    with pytest.raises(ValueError, match="whole matrices and was given a tensor of shape \\(3,\\)"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "kind": "matrices"}])
    optimizer = Muon([{"params": [nn.Parameter(torch.zeros(3, 2))], "kind": "matrices"}])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(6))]  # what DeepSpeed does
    with pytest.raises(ValueError, match=r"does not say how\. Train with RLHFDeepSpeedStrategy"):
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_momentum_of_bfloat16_weights_is_the_mean_of_their_gradients(nesterov: bool) -> None:
    weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    optimizer = Muon([{"params": [weight], "kind": "matrices"}], lr=0.1, momentum=0.5, nesterov=nesterov)
    mean = torch.zeros(6, 4)
    for step in range(4):
        weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
        mean = 0.5 * mean + 0.5 * weight.grad.float()
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"].float(), mean, rtol=0, atol=2e-2)
    full = nn.Parameter(torch.zeros(6, 4))
    same = Muon([{"params": [full], "kind": "matrices"}], lr=0.1, momentum=0.5, nesterov=nesterov)
    for step in range(4):
        full.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).bfloat16().float()
        same.step()
    assert float((full - weight.float()).norm() / full.norm()) < 0.02
