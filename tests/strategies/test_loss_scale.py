"""One loss over two fp16 engines: the gradients of both are right whatever their scales, and both step or neither.

Covers strategies/deepspeed/precision.py, with half_cases.py.
"""

from typing import Any

import pytest

from strategies import ranks

pytestmark = pytest.mark.distributed
STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def report(tmp_path_factory: Any, model_folder: str) -> dict[str, Any]:
    """All cases on two ranks in one launch."""
    return ranks.run("strategies.half_cases:everything", 2, tmp_path_factory.mktemp("half"), model=model_folder)[0]


def cases(stage: int) -> dict[str, int]:
    """The case in which one engine overflows, and the number of that engine."""
    return {"the critic overflows": 1} if stage % 2 else {"the policy overflows": 0}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_both_engines_are_those_of_float64_whatever_the_scales(report: dict[str, Any], stage: int) -> None:
    # Of the updates that were not skipped, in both engines. fp16 has 11 bits, 5e-4, and the model six layers; an update
    # that only one engine takes, or whose scale is wrong by a factor of 2, is an error of at least 0.08.
    for case in ("far apart", *cases(stage)):
        values = report[f"{case}, stage {stage}"]
        assert values["distance"]["policy"] < 3e-3
        assert values["distance"]["critic"] < 3e-3
        assert values["skipped"] == 0, "an overflow is no error"


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_lowers_the_scale_of_its_engine_only_and_scales_grow_where_nothing_overflows(
    report: dict[str, Any], stage: int
) -> None:
    values = report[f"far apart, stage {stage}"]
    assert values["stepped"] == [True] * 4
    assert values["scales"] == [[2.0**p, 2.0**c] for p, c in [(14, 3), (14, 3), (15, 4), (15, 4)]]
    for case, overflows in cases(stage).items():
        values = report[f"{case}, stage {stage}"]
        assert values["stepped"][:2] == [False, False]
        assert any(values["stepped"])
        mine, other = ([scales[engine] for scales in values["scales"]] for engine in (overflows, 1 - overflows))
        assert mine[1] == mine[0] / 2
        assert other[1] == other[0] == (2.0**8 if overflows == 0 else 2.0**10)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_scales_and_the_state_of_the_straight_one_bitwise(
    report: dict[str, Any], stage: int
) -> None:
    values = report[f"resume, stage {stage}"]
    assert values["first"][0][0] > 2.0**4, "not the scale with which the resumed run was configured"
    assert values["losses"]
    assert values["scales"]
    assert values["momentum"]
