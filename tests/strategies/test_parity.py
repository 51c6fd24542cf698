"""Every ZeRO stage trains like plain single-process Lightning, to fp32 rounding, on two ranks.

Covers strategies/strategy.py and deepspeed/engines.py, with parity_cases.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed

# Losses are about 4; neighbouring fp32 numbers there are 4.8e-7 apart, so 1e-6 is two units in the last place.
TOLERANCE = 1e-6
STAGES = [0, 1, 2, 3]
CASES = ["sgd, accumulate 3 of 4, clip", "two engines, reference", "tied", "gradient checkpointing"]


@pytest.fixture(scope="module")
def report(request: Any, tmp_path_factory: Any, model_folder: str, tied_model_folder: str) -> dict[str, Any]:
    """Of two ranks, for the stages and cases that are tested; one rank trains as two do in test_universal.py."""
    results = ranks.run(
        "strategies.parity_cases:parity",
        2,
        tmp_path_factory.mktemp("parity"),
        models=[model_folder, tied_model_folder],
        stages=ranks.tested(request, "stage") or STAGES,
        cases=ranks.tested(request, "case") or CASES,
    )
    for case, values in results[1].items():  # losses are averaged over ranks: everybody saw the same
        assert values["loss"] == results[0][case]["loss"]
    return results[0]


def runs() -> Iterator[Any]:
    for case in CASES:
        for stage in STAGES:
            smoke = case == "two engines, reference" and stage >= 2
            yield pytest.param(case, stage, marks=[pytest.mark.smoke] if smoke else [])


@pytest.mark.parametrize(("case", "stage"), runs())
def test_losses_weights_and_rates_equal_plain_lightning(report: dict[str, Any], case: str, stage: int) -> None:
    values = report[f"{case}, stage {stage}"]
    assert values["moved"] > 0.05, "the run must have learnt something, else equality shows nothing"
    assert values["loss"] <= TOLERANCE
    assert values["weight"] <= TOLERANCE
    assert values["rate"] == 0.0
    assert values["steps"][0] == values["steps"][1]
    assert values["child_type"] == "LlamaForCausalLM", "the raw children come back after fit"


@pytest.mark.parametrize("case", ["two engines, reference"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_norm_of_each_engine_is_known_and_logged(report: dict[str, Any], case: str, stage: int) -> None:
    values = report[f"{case}, stage {stage}"]
    last = values["norms"][-1]
    assert set(last) == {"policy", "critic"}
    assert values["logged"][-1] == pytest.approx(last["policy"], rel=1e-6)
    plain = values["plain_norms"][-1]
    assert last["policy"] == pytest.approx(plain["policy"], rel=1e-5)
    assert last["critic"] == pytest.approx(plain["critic"], rel=1e-5)
