"""Training resumes with another number of ranks as with the same one, and not at another ZeRO stage.

Covers strategies/checkpoint/universal.py and strategies/checkpoint/slow_steps.py, with universal_cases.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from strategies import ranks

pytestmark = pytest.mark.distributed

MUON = 5e-5
"""Losses and weights may differ by this: torch's Muon rounds its momentum to bfloat16. Lost momenta are 1e-3 off."""

Reports = dict[tuple[int, int], dict[str, Any]]
"""(Ranks that saved, ranks that resumed) to what happened in each case."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: Any) -> Path:
    """Where everything lies."""
    return tmp_path_factory.mktemp("universal")


@pytest.fixture(scope="module")
def reports(root: Path, model_folder: str, tied_model_folder: str) -> Reports:
    """Checkpoints of one and of two ranks, each resumed by one and by two."""
    arguments = {"model": model_folder, "tied": tied_model_folder, "place": str(root / "place")}
    for saved in (1, 2):
        ranks.run("strategies.universal_cases:save", saved, root / f"save-{saved}", **arguments)
    found = {}
    for saved in (1, 2):
        for count in (1, 2):
            folder = root / f"{saved}-{count}"
            results = ranks.run("strategies.universal_cases:resume", count, folder, saved_by=saved, **arguments)
            assert all(result.keys() == results[0].keys() for result in results)
            found[saved, count] = results[0]
    return found


def weight_difference(root: Path, saved: int, name: str) -> float:
    """Between the weights after a resume with the same and with the other number of ranks."""
    same, other = (torch.load(root / f"{saved}-{count}" / f"{name}.pt") for count in (saved, 3 - saved))
    return max((same[key].double() - other[key].double()).abs().max().item() for key in same)


@pytest.mark.parametrize(
    ("saved", "case", "name", "tolerance"),
    [
        *((saved, f"stage {s}, middle", f"{s}-middle", 1e-6) for s in range(4) for saved in (1, 2)),
        (2, "tied, stage 3, middle", "tied-3-middle", 1e-6),
        # 16-bit weights of 0.1 are 5e-4 apart, and a sum in another order may end on the other side.
        (1, "bf16, stage 3, middle", "bf16-3-middle", 5e-3),
        (1, "muon, stage 0, middle", "muon-0-middle", MUON),
        (2, "muon, stage 2, middle", "muon-2-middle", MUON),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_as_with_the_same(
    reports: Reports, root: Path, saved: int, case: str, name: str, tolerance: float
) -> None:
    same, other = reports[saved, saved][case], reports[saved, 3 - saved][case]
    # Two engines, groups of different learning rate and weight decay, a schedule, Adam's moments and a buffer.
    assert other["losses"] == pytest.approx(same["losses"], abs=tolerance)
    assert len(other["losses"]) == 2
    assert other["rates"] == same["rates"]
    assert (other["steps"], other["epoch"]) == (same["steps"], same["epoch"]) == (2, 1)
    assert other["seen"] == same["seen"] == 4, "a buffer that counts batches"
    assert weight_difference(root, saved, name) <= tolerance


@pytest.mark.parametrize("saved", [1, 2])
def test_the_original_is_only_read_and_no_copy_is_left(reports: Reports, saved: int) -> None:
    for case, values in reports[saved, 3 - saved].items():
        assert set(values["left"]) <= {"end.ckpt", "middle.ckpt"}, case
        assert values.get("untouched", True), case


@pytest.mark.parametrize("saved", [1, 2])
def test_what_cannot_be_dealt_anew_is_one_clear_error(reports: Reports, saved: int) -> None:
    other = reports[saved, 3 - saved]
    if saved == 2:
        error = other["sgd, stage 2, middle"]["error"]
        assert "keeps nothing. The number of ranks changes only for optimizers that keep" in error
        assert "['exp_avg'" in error
    for count in (1, 2):
        error = reports[saved, count]["stage 2 to 3, middle"]["error"]
        assert "at the ZeRO stages {'critic': 2, 'policy': 2}" in error or "{'policy': 2, 'critic': 2}" in error
        assert "the number of ranks may be another one" in error
    error = other["fixed size, middle"]["error"]
    assert f"saved by {saved} rank(s) inside an epoch" in error
    assert "do not say where they stood" in error


@pytest.mark.parametrize("saved", [1, 2])
def test_after_an_epoch_the_next_one_is_dealt_to_the_new_ranks(reports: Reports, saved: int) -> None:
    same, other = reports[saved, saved]["fixed size, end"], reports[saved, 3 - saved]["fixed size, end"]
    # Eight micro-batches of four rows an epoch: all for one rank, four for each of two.
    assert (len(same["losses"]), len(other["losses"])) == ((4, 8) if saved == 2 else (8, 4))
    assert (other["steps"], other["epoch"]) == (same["steps"], same["epoch"]) == (4, 2)


def test_an_error_of_rank_0_is_everybodys_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    first, second = ranks.run("strategies.universal_cases:slow", 2, tmp_path)
    assert first[:2] == second[:2] == ["from rank 0", "the disk is full"]
    for answers in (first, second):
        assert "sleeping" in answers[2]
        assert "took longer than 1 s on rank 0" in answers[2]
        assert "checkpoint_timeout" in answers[2]
