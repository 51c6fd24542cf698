"""The modules of rlhfkit under the strategy: a run stopped inside an epoch and resumed is bitwise the straight run.

Covers strategies/strategy.py, with module_cases.py.
"""

from pathlib import Path
from typing import Any

import pytest

from strategies import ranks
from strategies.module_cases import STAGES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """Where the checkpoints lie."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def reports(place: Path, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """All modules, each at another stage, on two ranks."""
    return ranks.run("strategies.module_cases:resume", 2, tmp_path_factory.mktemp("runs"), place=str(place))


@pytest.mark.parametrize("kind", STAGES)
def test_resume_is_bitwise_the_straight_run(reports: list[dict[str, Any]], kind: str) -> None:
    for report in reports:
        values = report[kind]
        straight, resumed = values["losses"]
        assert straight == resumed
        assert len(resumed) == 6, "two epochs of four batches, saved after two"
        assert values["weight"] == 0.0
        assert values["moved"]


def test_on_other_ranks_the_middle_of_an_epoch_is_refused_by_whoever_knows_why(
    reports: list[dict[str, Any]], place: Path, tmp_path: Path
) -> None:
    found = ranks.run("strategies.module_cases:other_ranks", 1, tmp_path, place=str(place))[0]
    assert "world_size was 2 and is 1" in found["sft"]
    assert "its data loaders differ between ranks" in found["grpo"], "samples of an iteration belong to ranks"
