"""Optimizers of whole matrices compute with flat tensors that ranks divide as with whole parameters, bit for bit.

Covers flat_parameters.py and modules/optimizers/muon_adamw.py.
"""

from pathlib import Path

import flat_parameters_ranks as cases
import pytest
from strategies import ranks


@pytest.mark.distributed
def test_three_ranks_step_whole_matrices_as_one_process_does(tmp_path: Path) -> None:
    worked = {"moved": True, "same": True}
    expected = {"maps": True, "muon": worked, "muon without Nesterov": worked}
    for report in ranks.run("flat_parameters_ranks:on_ranks", 3, tmp_path):
        assert report == dict.fromkeys(cases.DIVISIONS, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("division", cases.DIVISIONS)
def test_every_rank_knows_the_same_owners_and_divided_parameters_have_one(division: str, count: int) -> None:
    layouts = [cases.layout_of(cases.STACKS, division, rank, count) for rank in range(count)]
    assert all(layout.rounds == layouts[0].rounds for layout in layouts)
    owned = [number for owners in layouts[0].rounds for number in owners if number is not None]
    whole = [number for layout in layouts for number in layout.whole]
    assert sorted(owned + whole) == list(range(len(cases.STACKS)))
    if division == "one after another":
        assert len(owned) < count, "only a parameter at a border between two ranks is divided"


def test_owners_of_divided_matrices_compute_about_as_much() -> None:
    shapes = [(64, 64)] * 12 + [(128, 64)] * 6
    layout = cases.layout_of(shapes, "slices of each", 0, 4)
    work = [0, 0, 0, 0]
    for owners in layout.rounds:
        for rank, number in enumerate(owners):
            work[rank] += 0 if number is None else shapes[number][0]
    assert sum(work) == sum(rows for rows, _ in shapes)
    assert max(work) - min(work) <= 64, "one small matrix"
