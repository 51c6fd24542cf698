"""Learning rates against Transformers' schedules of the same names, and the kernels of AdamW."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from transformers import get_scheduler

from rlhfkit.modules.optim import SCHEDULES, learning_rate_factor, make_adamw


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
def test_every_step_has_the_rate_that_transformers_gives_it(schedule: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, warmup, 30)
    for step in range(30):
        factor = learning_rate_factor(step, schedule=schedule, warmup_steps=warmup, total_steps=30)
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        assert 0.0 <= factor <= 1.0
        optimizer.step()
        theirs.step()


def trainer_on(device: str, precision: Precision | None = None) -> Any:
    """What the choice of kernels reads of a Trainer; one on a GPU cannot be made without a GPU."""
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, precision_plugin=precision or Precision())


@pytest.mark.parametrize(
    ("trainer", "fused", "said"),
    [
        (None, None, "default kernels of torch, no Trainer"),
        (trainer_on("cpu"), None, "default kernels of torch, not on a GPU"),
        (trainer_on("cuda"), True, "fused kernels of torch, on a GPU"),
        (trainer_on("cuda", MixedPrecision("bf16-mixed", "cuda")), True, "fused kernels of torch, on a GPU"),
        (
            trainer_on("cuda", MixedPrecision("16-mixed", "cuda")),
            None,
            "default kernels of torch, Lightning's gradient scaler",
        ),
    ],
    ids=["no trainer", "cpu", "gpu", "gpu, bf16-mixed", "gpu, 16-mixed"],
)
def test_adamw_is_fused_on_gpus_and_says_so(
    trainer: Any, fused: bool | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):  # whatever tests before have set
        caplog.set_level(logging.INFO, logger=name)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.5}]
    optimizer = make_adamw(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, trainer=trainer)
    assert optimizer.param_groups[0]["fused"] is fused
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")} == {
        "lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.3
    }  # fmt: skip
    assert said in caplog.text


def test_fused_steps_agree_to_rounding_and_go_on_from_a_checkpoint_bit_for_bit() -> None:
    def steps(optimizer: torch.optim.AdamW, weight: torch.nn.Parameter, numbers: range) -> None:
        for number in numbers:
            weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(number))
            optimizer.step()

    def made(fused: bool | None) -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
        weight = torch.nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(99)))
        optimizer = make_adamw([{"params": [weight]}], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, trainer=None)
        optimizer.param_groups[0]["fused"] = fused  # on the CPU, where torch 2.4 and later have such a kernel too
        return weight, optimizer

    (plain, default), (weight, fused), (resumed, after) = made(None), made(True), made(True)
    steps(default, plain, range(10))
    steps(fused, weight, range(6))
    resumed.data.copy_(weight.data)
    after.load_state_dict(copy.deepcopy(fused.state_dict()))
    for optimizer, one in ((fused, weight), (after, resumed)):
        steps(optimizer, one, range(6, 10))
    assert torch.equal(weight, resumed)
    torch.testing.assert_close(weight, plain, rtol=1e-5, atol=1e-6)
