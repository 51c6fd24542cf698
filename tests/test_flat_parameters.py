"""Optimizers of whole matrices compute with flat tensors that ranks divide as with whole parameters, bit for bit.

Covers flat_parameters.py and modules/optimizers/muon_adamw.py.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import Tensor

from rlhfkit.flat_parameters import FlatLayout, Fragment
from rlhfkit.modules.optimizers import Muon

SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (3, 4), (20, 6), (6, 9), (2, 2), (5, 1))
STACKS: tuple[tuple[int, ...], ...] = (*SHAPES, (11,), (2, 3, 4), (1,))


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


def size_of(layout: FlatLayout) -> int:
    """Of this rank's flat tensor, with something behind the last parameter."""
    return 2 + max(parts[layout.rank].offset + parts[layout.rank].length for parts in layout.fragments)


def fill(layout: FlatLayout, flat: Tensor, values: Sequence[Tensor]) -> None:
    """Set this rank's parts."""
    for number, whole in enumerate(values):
        start = sum(part.length for part in layout.fragments[number][: layout.rank])
        part = layout.own_part(number, flat)
        part.copy_(whole.flatten()[start : start + len(part)])


def randoms(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def check(layout: FlatLayout, flat: Tensor, wholes: Sequence[Tensor]) -> None:
    """This rank's parts are those of whole tensors, and the rest is 0."""
    expected = torch.zeros_like(flat)
    fill(layout, expected, wholes)
    assert torch.equal(flat, expected), layout


def check_maps(layout: FlatLayout) -> None:
    """A function of the whole parameters is computed once for each, and comes back to all."""
    firsts, seconds, calls = randoms(layout.shapes, 1), randoms(layout.shapes, 2), []
    flats = [torch.zeros(size_of(layout)) for _ in range(2)]
    for flat, values in zip(flats, (firsts, seconds), strict=True):
        fill(layout, flat, values)

    def together(number: int, first: Tensor, second: Tensor) -> Tensor:
        calls.append(number)
        return first * (number + 1) + second.sum()

    result = layout.map_whole(together, flats)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, calls)
    assert sorted(number for each in everybody for number in each) == list(range(len(layout.shapes))), everybody
    pairs = zip(firsts, seconds, strict=True)
    check(layout, result, [a * (n + 1) + b.sum() for n, (a, b) in enumerate(pairs)])


def check_steps(layout: FlatLayout, **options: Any) -> None:
    """Five steps of Muon, of which the last two come after a resume, are those of whole parameters."""
    wholes = [torch.nn.Parameter(value) for value in randoms(layout.shapes, 3)]
    flat = torch.zeros(size_of(layout), requires_grad=True)
    with torch.no_grad():
        fill(layout, flat, wholes)

    def optimizer_of(parameters: list[Tensor]) -> Any:
        return Muon([{"params": parameters, "kind": "matrices"}], lr=0.1, weight_decay=0.2, **options)

    def divided_optimizer() -> Any:
        made = optimizer_of([torch.nn.Parameter(torch.zeros(2, 2))])
        made.param_groups[0]["params"] = [flat]  # as DeepSpeed does
        made.set_flat_layouts({flat: layout})
        return made

    whole, divided = optimizer_of(wholes), divided_optimizer()
    for step in range(5):
        gradients = randoms(layout.shapes, 10 + step)
        flat.grad = torch.zeros_like(flat)
        fill(layout, flat.grad, gradients)
        for parameter, gradient in zip(wholes, gradients, strict=True):
            parameter.grad = gradient
        if step == 3:
            state = divided.state_dict()
            divided = divided_optimizer()
            divided.load_state_dict(state)
        whole.step()
        divided.step()
    assert not any(map(torch.equal, wholes, randoms(layout.shapes, 3))), "nothing moved"
    check(layout, flat.detach(), [parameter.detach() for parameter in wholes])


def on_ranks(folder: Path) -> None:
    """All of the above."""
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for division in DIVISIONS:
        matrices, stacks = (layout_of(shapes, division, rank, world) for shapes in (SHAPES, STACKS))
        check_maps(stacks)
        check_steps(matrices)
        check_steps(matrices, nesterov=False, adjust_lr="original")


@pytest.mark.distributed
def test_three_ranks_step_whole_matrices_as_one_process_does(tmp_path: Path) -> None:
    ranks.run("test_flat_parameters:on_ranks", 3, tmp_path)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_rank_knows_the_same_owners_and_divided_parameters_have_one(division: str, count: int) -> None:
    layouts = [layout_of(STACKS, division, rank, count) for rank in range(count)]
    assert all(layout.rounds == layouts[0].rounds for layout in layouts)
    owned = [number for owners in layouts[0].rounds for number in owners if number is not None]
    whole = [number for layout in layouts for number in layout.whole]
    assert sorted(owned + whole) == list(range(len(STACKS)))
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
