"""A stopped and resumed run is bitwise the straight run; damage is found and named. Kills: test_kills.py.

Covers strategies/checkpoint/io.py, with resume_cases.py.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint import verification
from strategies import ranks
from strategies.test_directory import write

pytestmark = pytest.mark.distributed
STAGES, PRECISIONS = [0, 1, 2, 3], ["32-true", "bf16-true"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """Where the checkpoints of this module lie."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def report(place: Path, model_folder: str) -> dict[str, Any]:
    """Straight and resumed runs with two engines, a frozen reference, dropout, accumulation and a schedule."""
    arguments = {"model": model_folder, "stages": STAGES, "precisions": PRECISIONS}
    results = ranks.run("strategies.resume_cases:resume", 2, place, **arguments)
    for case, values in results[1].items():
        if "loss" in values:
            results[0][case]["loss"] = max(values["loss"], results[0][case]["loss"])
    for name in ("losses", "missing"):
        assert results[1]["damage"][name] == results[0]["damage"][name], "all ranks learn what one has found"
    return results[0]


RUNS = [*((s, "32-true") for s in STAGES), (0, "bf16-true"), (1, "bf16-true")]
ENDS = [(*run, moment) for run in RUNS for moment in ("end", "middle")]
MOMENTS = [*ENDS, *((stage, "32-true", "window") for stage in (2, 3))]


@pytest.mark.parametrize(("stage", "precision", "moment"), MOMENTS)
def test_resume_is_bitwise_the_straight_run(report: dict[str, Any], stage: int, precision: str, moment: str) -> None:
    values = report[f"stage {stage}, {precision}, {moment}"]
    assert values["loss"] == 0.0
    assert values["weight"] == 0.0
    assert values["rates_equal"]


def test_frozen_children_are_not_saved_and_every_rank_has_its_file(report: dict[str, Any]) -> None:
    for case, values in report.items():
        if "files" in values:
            assert values["files"] == ["critic", "manifest.json", "policy", "rank_00000.pt", "rank_00001.pt"], case
            assert values["best"].endswith("end.ckpt")


def test_evaluation_of_a_checkpoint_is_the_same_from_every_stage(report: dict[str, Any]) -> None:
    losses = [report[f"stage {stage}, evaluation"]["validation"] for stage in STAGES]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-6)
    # Training has moved the weights: the untrained loss of this batch is 4.02.
    assert losses[0] < 3.95


def test_weights_load_on_another_number_of_ranks(
    report: dict[str, Any], place: Path, tmp_path: Path, model_folder: str
) -> None:
    loss = ranks.run("strategies.resume_cases:on_one_rank", 1, tmp_path, model=model_folder, place=str(place))[0]
    assert loss == pytest.approx(report["stage 3, evaluation"]["validation"], abs=1e-6)


def test_damage_is_named_and_the_previous_checkpoint_is_used(report: dict[str, Any]) -> None:
    assert report["damage"]["losses"] == 6, "resumed from the window (2 of 8 batches done), not from the end (4)"
    (warning,) = report["damage"]["warnings"]
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged (Bad CRC-32" in warning
    assert "(Found by rank 1.)" in warning
    assert "window.ckpt" in warning, "the newest of the others"
    assert "1 optimizer steps are lost: it is of step 1, not of step 2." in warning
    assert "typo.ckpt does not exist" in report["damage"]["missing"]


def test_the_last_complete_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=0)
    for name in ("a.ckpt", "b.ckpt"):
        write(tmp_path / name, name, 0.0)
    (tmp_path / "b.ckpt" / "rank_00000.pt").unlink()
    with pytest.warns(UserWarning, match="only complete checkpoint"):
        strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert verification.verify(tmp_path / "a.ckpt")
    strategy.remove_checkpoint(tmp_path / "b.ckpt")  # the broken one may go
    assert os.listdir(tmp_path) == ["a.ckpt"]
