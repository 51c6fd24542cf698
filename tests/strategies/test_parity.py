"""Every ZeRO stage trains like plain single-process Lightning, to fp32 rounding, on one rank and on two.

Covers strategies/strategy.py and deepspeed/engines.py, with parity_cases.py.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed

# Losses are about 4; neighbouring fp32 numbers there are 4.8e-7 apart, so 1e-6 is two units in the last place.
TOLERANCE = 1e-6
STAGES = [0, 1, 2, 3]
CASES = ["sgd, accumulate 3 of 4, clip", "two engines, reference", "tied", "gradient checkpointing"]


Reports = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def reports(request: Any, tmp_path_factory: Any, model_folder: str, tied_model_folder: str) -> Reports:
    """What one launch with so many ranks reports, of the stages and cases that are tested."""

    @functools.cache
    def report(number: int) -> dict[str, Any]:
        results = ranks.run(
            "strategies.parity_cases:parity",
            number,
            tmp_path_factory.mktemp("parity"),
            models=[model_folder, tied_model_folder],
            stages=ranks.tested(request, "stage", number=number) or STAGES,
            cases=ranks.tested(request, "case", number=number) or CASES,
        )
        for other in results[1:]:
            for case, values in other.items():  # losses are averaged over ranks: everybody saw the same
                assert values["loss"] == results[0][case]["loss"]
        return results[0]

    return report


def runs() -> Iterator[Any]:
    for number, cases in ((1, ["two engines, reference"]), (2, CASES)):
        for case in cases:
            for stage in STAGES:
                smoke = number == 2 and case == "two engines, reference" and stage >= 2
                yield pytest.param(number, case, stage, marks=[pytest.mark.smoke] if smoke else [])


@pytest.mark.parametrize(("number", "case", "stage"), runs())
def test_losses_weights_and_rates_equal_plain_lightning(reports: Reports, number: int, case: str, stage: int) -> None:
    values = reports(number)[f"{case}, stage {stage}"]
    assert values["moved"] > 0.05, "the run must have learnt something, else equality shows nothing"
    assert values["loss"] <= TOLERANCE
    assert values["weight"] <= TOLERANCE
    assert values["rate"] == 0.0
    assert values["steps"][0] == values["steps"][1]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", ["two engines, reference"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_norm_of_each_engine_is_known_and_logged(reports: Reports, number: int, case: str, stage: int) -> None:
    values = reports(number)[f"{case}, stage {stage}"]
    last = values["norms"][-1]
    assert set(last) == {"policy", "critic"}
    assert values["logged"][-1] == pytest.approx(last["policy"], rel=1e-6)
    plain = values["plain_norms"][-1]
    assert last["policy"] == pytest.approx(plain["policy"], rel=1e-5)
    assert last["critic"] == pytest.approx(plain["critic"], rel=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_the_raw_children_come_back_after_fit(reports: Reports, number: int) -> None:
    assert {values["child_type"] for values in reports(number).values()} == {"LlamaForCausalLM"}
