"""Precision, evaluation without fit, dropped gradients and manual optimization at every ZeRO stage.

Covers strategies/strategy.py, deepspeed/precision.py and deepspeed/gradients.py, with behaviour_cases.py.
"""

from typing import Any

import pytest

from strategies import ranks
from strategies.behaviour_cases import DISCARDED, EVALUATED

pytestmark = pytest.mark.distributed
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def report(tmp_path_factory: Any, model_folder: str) -> dict[str, Any]:
    """Everything on two ranks in one launch."""
    folder = tmp_path_factory.mktemp("behaviour")
    return ranks.run("strategies.behaviour_cases:everything", 2, folder, model=model_folder, stages=STAGES)[0]


@pytest.mark.parametrize("case", [f"{stage}, bf16-true" for stage in STAGES] + ["3, bf16-mixed"])
def test_bf16_stays_near_fp32(report: dict[str, Any], case: str) -> None:
    values = report["precision"][case]
    # bf16 has 8 bits: weights of 0.1 round by up to 4e-4, and losses of about 4 moved by 2.3e-3 at most in 4 steps.
    assert 0 < values["loss"] < 5e-3
    assert values["dtypes"] == ["torch.bfloat16"]


def test_batches_and_buffers_keep_their_dtypes_under_bf16(report: dict[str, Any]) -> None:
    assert report["inputs"] == {
        "tokens": "torch.int64",
        "advantages": "torch.float32",
        "old": "torch.float64",
        "rotary": "torch.float32",
    }


@pytest.mark.parametrize("stage", EVALUATED)
def test_validation_before_between_and_after_fits_of_one_module(report: dict[str, Any], stage: int) -> None:
    values = report["evaluation"][str(stage)]
    assert values["expected"][0] - values["expected"][-1] > 0.1, "it must have learnt, else equality shows nothing"
    assert values["found"] == pytest.approx(values["expected"], abs=1e-6)


@pytest.mark.parametrize(("stage", "kind"), DISCARDED)
def test_zero_grad_drops_gradients_that_were_reduced_already(report: dict[str, Any], stage: int, kind: str) -> None:
    values = report["discard"][f"{stage}, {kind}"]
    assert values == {"loss": 0.0, "weight": 0.0}


@pytest.mark.parametrize("stage", STAGES)
def test_several_optimizers_with_manual_optimization_equal_plain_lightning(report: dict[str, Any], stage: int) -> None:
    values = report["manual"][str(stage)]
    assert values["loss"] <= 1e-6
    assert values["weight"] <= 1e-6
