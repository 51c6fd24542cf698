"""Optimizers of modules under every strategy on two ranks, beside one rank without DeepSpeed.

Covers optim.py and strategies/deepspeed/param_groups.py.
"""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit import Optimization, RLHFDeepSpeedStrategy, SFTModule

pytestmark = pytest.mark.distributed
EIGHT_BITS = importlib.util.find_spec("bitsandbytes") is not None
CASES: list[list[Any]] = [
    *(["sgd", strategy, {}] for strategy in ("rlhf_zero3", "offload")),
    *(["adamw_8bit", strategy, {}] for strategy in ("rlhf_zero2", "offload") if EIGHT_BITS),
    *(["muon", strategy, {}] for strategy in ("ddp", "rlhf_zero1", "rlhf_zero3", "offload")),
    *(["muon", f"rlhf_zero{stage}", {"precision": "bf16-true"}] for stage in (0, 2)),
    *([name, "rlhf_zero2", {}] for name in ("adafactor", "torch.optim.Adafactor")),
]
FLAT = ("muon, rlhf_zero1", "muon, rlhf_zero3", "muon, offload")
"""In float32, where the weights of the model are the optimizer's."""
RESUMED = [
    *([["adamw_8bit", "rlhf_zero2"]] if EIGHT_BITS else []),
    *(["muon", strategy] for strategy in ("offload", "rlhf_zero3")),
]
# Losses are about 4, where neighbouring float32 numbers are 4.8e-7 apart. Muon's matrix iterations are in bfloat16, of
# whose 8 bits a rounding of the gradient can change the last, so that DDP is as far from one rank as ZeRO is
# (test_flat_parameters.py has the same steps bit for bit); 8-bit moments are quantised in blocks, which flat partitions
# cut elsewhere; weights in bfloat16 are rounded.
TOLERANCES = {"muon": (1e-3, 5e-3), "adamw_8bit": (2e-3, 2e-2), "bf16-true": (2e-2, 2e-2)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one launch."""
    folder = tmp_path_factory.mktemp("optimizers")
    tiny_model(folder / "model")
    arguments = {"model": str(folder / "model"), "cases": CASES, "resumed": RESUMED}
    result: dict[str, Any] = ranks.run("modules.optimizer_cases:on_ranks", 2, folder, **arguments)[0]
    return result


def test_two_ranks_learn_what_one_learns(report: dict[str, Any]) -> None:
    shown = {case: values for case, values in report.items() if "loss" in values}
    assert len(shown) == (10 if EIGHT_BITS else 8)
    for case, values in shown.items():
        name = "bf16-true" if "bf16-true" in case else case.partition(",")[0]
        loss, weight = TOLERANCES.get(name, (2e-6, 2e-6))
        assert values["moved"] > 1.0, f"{case}: it must have learnt something, else equality shows nothing"
        assert values["loss"] <= loss, case
        assert values["weight"] <= weight, case
        assert values["rates"], case
        assert values["clipped"] == (6 if case.startswith("muon") else 0), case


def test_the_flat_tensors_of_every_stage_hold_the_parameters_that_the_layout_says(report: dict[str, Any]) -> None:
    assert {case: report[case]["put_together"] for case in FLAT} == dict.fromkeys(FLAT, 20), "weights of the model"


def test_a_stopped_run_goes_on_bit_for_bit(report: dict[str, Any]) -> None:
    shown = [values for case, values in report.items() if case.endswith("resumed")]
    assert shown == [{"losses": True, "rates": True, "weight": 0.0}] * len(RESUMED)


def test_other_optimizers_of_whole_parameters_are_refused_where_parameters_are_divided(report: dict[str, Any]) -> None:
    errors = {case: values["error"] for case, values in report.items() if "error" in values}
    assert set(errors) == {"adafactor, rlhf_zero2", "torch.optim.Adafactor, rlhf_zero2"}
    for error in errors.values():
        assert "computes with whole parameters, and ZeRO flattens and divides them" in error
        assert "optimizer='muon' alone knows" in error
        assert "Trainer(strategy='ddp')" in error


@pytest.mark.parametrize(
    ("kind", "arguments", "why"),
    [
        (
            RLHFDeepSpeedStrategy,
            {"stage": 2, "offload_optimizer": True, "offload_optimizer_device": "nvme"},
            "DeepSpeed.s NVMe offload",
        ),
        (DeepSpeedStrategy, {"stage": 2}, "DeepSpeedStrategy does not say how DeepSpeed divides them"),
        (FSDPStrategy, {}, "FSDPStrategy divides them"),
    ],
)
def test_muon_is_refused_where_nothing_says_which_matrices_a_flat_tensor_has(
    kind: Any, arguments: Any, why: str
) -> None:
    module = SFTModule("not loaded", optimization=Optimization(optimizer="muon"))
    module.policy = torch.nn.Linear(2, 2)
    module._trainer = SimpleNamespace(strategy=kind(**arguments), gradient_clip_val=None, global_rank=0, world_size=1)
    with pytest.raises(ValueError, match=f"optimizer='muon' computes with whole parameters, and {why}"):
        module.configure_optimizers()
