"""Optimizers of whole matrices over flat tensors on several ranks, for ``test_flat_parameters.py``."""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


def same(layout: FlatLayout, flat: Tensor, wholes: Sequence[Tensor]) -> bool:
    """Whether this rank's parts are those of whole tensors, and the rest is 0."""
    expected = torch.zeros_like(flat)
    fill(layout, expected, wholes)
    return torch.equal(flat, expected)


def maps(layout: FlatLayout) -> bool:
    """Whether a function of the whole parameters is computed once for each, and comes back to all."""
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
    once = sorted(number for each in everybody for number in each) == list(range(len(layout.shapes)))
    pairs = zip(firsts, seconds, strict=True)
    return once and same(layout, result, [a * (n + 1) + b.sum() for n, (a, b) in enumerate(pairs)])


def steps(layout: FlatLayout, **options: Any) -> dict[str, bool]:
    """Five steps of Muon, of which the last two come after a resume, beside those of whole parameters."""
    wholes = [torch.nn.Parameter(value) for value in randoms(layout.shapes, 3)]
    flat = torch.zeros(size_of(layout), requires_grad=True)
    with torch.no_grad():
        fill(layout, flat, wholes)

    def optimizer_of(parameters: list[Tensor]) -> Any:
        return Muon([{"params": parameters, "kind": "matrices"}], lr=0.1, weight_decay=0.2, **options)

    whole, divided = optimizer_of(wholes), optimizer_of([torch.nn.Parameter(torch.zeros(2, 2))])
    divided.param_groups[0]["params"] = [flat]  # as DeepSpeed does
    divided.set_flat_layouts({flat: layout})
    for step in range(5):
        gradients = randoms(layout.shapes, 10 + step)
        flat.grad = torch.zeros_like(flat)
        fill(layout, flat.grad, gradients)
        for parameter, gradient in zip(wholes, gradients, strict=True):
            parameter.grad = gradient
        if step == 3:
            state = divided.state_dict()
            divided = optimizer_of([torch.nn.Parameter(torch.zeros(2, 2))])
            divided.param_groups[0]["params"] = [flat]
            divided.set_flat_layouts({flat: layout})
            divided.load_state_dict(state)
        whole.step()
        divided.step()
    return {
        "moved": not any(map(torch.equal, wholes, randoms(layout.shapes, 3))),
        "same": same(layout, flat.detach(), [parameter.detach() for parameter in wholes]),
    }


def on_ranks(folder: Path) -> dict[str, Any]:
    """All of the above."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    report: dict[str, Any] = {}
    for division in DIVISIONS:
        matrices, stacks = (layout_of(shapes, division, rank, ranks) for shapes in (SHAPES, STACKS))
        report[division] = {
            "maps": maps(stacks),
            "muon": steps(matrices),
            "muon without Nesterov": steps(matrices, nesterov=False, adjust_lr="original"),
        }
    return report
