"""Optimizers of modules under every strategy on two ranks, beside one rank without DeepSpeed. Covers ``optim.py``."""

import importlib.util
from typing import Any

import pytest
from strategies import ranks
from tiny_models import tiny_model

pytestmark = pytest.mark.distributed
EIGHT_BITS = importlib.util.find_spec("bitsandbytes") is not None
CASES: list[list[Any]] = [
    *(["sgd", strategy, {}] for strategy in ("rlhf_zero3", "offload")),
    *(["adamw_8bit", strategy, {}] for strategy in ("rlhf_zero2", "offload") if EIGHT_BITS),
    *(["muon", strategy, {}] for strategy in ("ddp", "rlhf_zero0", "rlhf_zero3")),
    ["muon", "rlhf_zero0", {"precision": "bf16-true"}],
    ["adafactor", "rlhf_zero0", {}],
    ["adafactor", "rlhf_zero2", {}],
]
RESUMED = [*([["adamw_8bit", "rlhf_zero2"]] if EIGHT_BITS else []), ["muon", "rlhf_zero0"]]
# Losses are about 4, where neighbouring float32 numbers are 4.8e-7 apart. Muon's matrix iterations are in bfloat16, of
# whose 8 bits a rounding of the gradient can change the last; 8-bit moments are quantised in blocks, which flat
# partitions cut elsewhere.
TOLERANCES = {"muon": (1e-3, 5e-3), "adamw_8bit": (2e-3, 2e-2)}


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
    assert len(shown) == (7 if EIGHT_BITS else 5)
    for case, values in shown.items():
        loss, weight = TOLERANCES.get(case.partition(",")[0], (2e-6, 2e-6))
        assert values["moved"] > 1.0, f"{case}: it must have learnt something, else equality shows nothing"
        assert values["loss"] <= loss, case
        assert values["weight"] <= weight, case
        assert values["rates"], case


def test_a_stopped_run_goes_on_bit_for_bit(report: dict[str, Any]) -> None:
    shown = [values for case, values in report.items() if case.endswith("resumed")]
    assert shown == [{"losses": True, "rates": True, "weight": 0.0}] * len(RESUMED)


def test_optimizers_of_whole_parameters_are_refused_where_parameters_are_divided(report: dict[str, Any]) -> None:
    errors = {case: values["error"] for case, values in report.items() if "error" in values}
    bf16 = "muon, rlhf_zero0, {'precision': 'bf16-true'}"
    assert set(errors) == {"muon, rlhf_zero3", bf16, "adafactor, rlhf_zero2"}
    for case, error in errors.items():
        assert "computes with whole parameters" in error
        assert ("16-bit training are flat" if case == bf16 else "ZeRO flattens and divides them") in error
        assert "Trainer(strategy='ddp')" in error
