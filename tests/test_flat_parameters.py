"""Functions of whole parameters compute with flat tensors that ranks divide as with whole ones, bit for bit.

Covers flat_parameters.py; optimizers that use them: ``modules/test_optim.py``.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import Tensor

from rlhfkit.flat_parameters import FlatLayout, Fragment

SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (3, 4), (20, 6), (6, 9), (2, 2), (5, 1), (11,), (2, 3, 4), (1,))


def one_after_another(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[tuple[Fragment, ...]]:
    """Equal slices of all parameters, as at ZeRO 1 and 2."""
    size = -(-sum(map(prod, shapes)) // ranks) + 1  # with padding in the end
    fragments, begin = [], 0
    for shape in shapes:
        end = begin + prod(shape)
        cuts = [(max(begin, rank * size), min(end, (rank + 1) * size)) for rank in range(ranks)]
        fragments.append(
            tuple(
                Fragment(first - rank * size, last - first) if last > first else Fragment(0, 0)
                for rank, (first, last) in enumerate(cuts)
            )
        )
        begin = end
    return fragments


def slices_of_each(shapes: Sequence[tuple[int, ...]], ranks: int) -> list[tuple[Fragment, ...]]:
    """Equal slices of each parameter, as at ZeRO 3."""
    fragments, offset = [], 0
    for shape in shapes:
        size = -(-prod(shape) // ranks)
        lengths = [max(0, min(size, prod(shape) - rank * size)) for rank in range(ranks)]
        fragments.append(tuple(Fragment(offset if length else 0, length) for length in lengths))
        offset += size
    return fragments


DIVISIONS = {"one after another": one_after_another, "slices of each": slices_of_each}


def layout_of(shapes: Sequence[tuple[int, ...]], division: str, rank: int, ranks: int) -> FlatLayout:
    """Of a rank."""
    fragments = tuple(DIVISIONS[division](shapes, ranks))
    return FlatLayout(tuple(shapes), fragments, rank, None, torch.device("cpu"))


def filled(layout: FlatLayout, values: Sequence[Tensor]) -> Tensor:
    """This rank's flat tensor of whole values, with something behind the last parameter."""
    flat = torch.zeros(2 + max(parts[layout.rank].offset + parts[layout.rank].length for parts in layout.fragments))
    for number, whole in enumerate(values):
        start = sum(part.length for part in layout.fragments[number][: layout.rank])
        part = layout.own_part(number, flat)
        part.copy_(whole.flatten()[start : start + len(part)])
    return flat


def randoms(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def on_ranks(folder: Path) -> None:
    """A function of the whole parameters of two flat tensors comes back to all; the rest is 0."""
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for division in DIVISIONS:
        layout = layout_of(SHAPES, division, rank, world)
        firsts, seconds = randoms(SHAPES, 1), randoms(SHAPES, 2)
        flats = [filled(layout, values) for values in (firsts, seconds)]
        found = layout.map_whole(lambda number, first, second: first * (number + 1) + second.sum(), flats)
        pairs = enumerate(zip(firsts, seconds, strict=True))
        assert torch.equal(found, filled(layout, [one * (n + 1) + other.sum() for n, (one, other) in pairs])), layout


@pytest.mark.distributed
def test_three_ranks_compute_with_whole_parameters_as_one_process_does(tmp_path: Path) -> None:
    ranks.run("test_flat_parameters:on_ranks", 3, tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_rank_knows_the_same_owners_and_divided_parameters_have_one(division: str, count: int) -> None:
    layouts = [layout_of(SHAPES, division, rank, count) for rank in range(count)]
    assert all(layout.rounds == layouts[0].rounds for layout in layouts)
    owned = [number for owners in layouts[0].rounds for number in owners if number is not None]
    whole = [number for layout in layouts for number in layout.whole]
    assert sorted(owned + whole) == list(range(len(SHAPES)))
    if division == "one after another":
        assert len(owned) < count, "only a parameter at a border between two ranks is divided"


def test_owners_of_divided_matrices_compute_about_as_much() -> None:
    shapes = [(64, 64)] * 12 + [(128, 64)] * 6
    layout = layout_of(shapes, "slices of each", 0, 4)
    work = [0, 0, 0, 0]
    for owners in layout.rounds:
        for rank, number in enumerate(owners):
            work[rank] += 0 if number is None else shapes[number][0]
    assert sum(work) == sum(rows for rows, _ in shapes)
    assert max(work) - min(work) <= 64, "one small matrix"
