"""``FlatLayout``: which parts of which parameters lie in the flat tensors that ZeRO gives an optimizer on each rank.

The strategy knows the layout, an optimizer of whole matrices needs it; they meet here. Imports torch only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Fragment(NamedTuple):
    """What one rank has of a parameter: ``length`` numbers, in order, from ``offset`` of the rank's flat tensor on."""

    offset: int
    length: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters whose numbers lie in flat tensors, one tensor on each rank of a group; ranks have them in order.

    Each parameter has an owner among the ranks, which computes what needs all of it: the rank that has all of it, or,
    of those that are divided, one of the ranks, so that all compute about as much (Liu et al., 2025, arXiv:2502.16982,
    section 2.3). It is the same on every rank.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Of the whole parameters."""
    fragments: tuple[tuple[Fragment, ...], ...]
    """Of each parameter, by rank."""
    rank: int
    """Of this process in the group."""
    group: Any
    """Process group of the ranks; not used if one rank has everything."""
    device: torch.device
    """Where whole parameters are put together, whatever the device of the flat tensors."""
    rounds: tuple[tuple[int | None, ...], ...] = field(init=False)
    """Of divided parameters, by owner: in each round a rank owns at most one."""
    whole: tuple[int, ...] = field(init=False)
    """The parameters of which this rank has everything."""

    def __post_init__(self) -> None:
        ranks = len(self.fragments[0]) if self.fragments else 1
        work = [0] * ranks
        divided: list[int] = []
        whole: list[int] = []
        for number, shape in enumerate(self.shapes):
            holders = [rank for rank, part in enumerate(self.fragments[number]) if part.length]
            if len(holders) > 1:
                divided.append(number)
                continue
            work[holders[0]] += _work(shape)
            if holders[0] == self.rank:
                whole.append(number)
        owned: list[list[int]] = [[] for _ in range(ranks)]
        for number in sorted(divided, key=lambda one: -_work(self.shapes[one])):  # the largest first
            owner = min(range(ranks), key=lambda rank: (work[rank], rank))
            owned[owner].append(number)
            work[owner] += _work(self.shapes[number])
        rounds = max((len(numbers) for numbers in owned), default=0)
        table = tuple(
            tuple(numbers[turn] if turn < len(numbers) else None for numbers in owned) for turn in range(rounds)
        )
        object.__setattr__(self, "rounds", table)
        object.__setattr__(self, "whole", tuple(whole))

    def own_part(self, number: int, flat: Tensor) -> Tensor:
        """This rank's part of a parameter, a one-dimensional view of its flat tensor."""
        part = self.fragments[number][self.rank]
        return flat.narrow(0, part.offset, part.length)

    def map_whole(self, function: Callable[..., Tensor], flats: Sequence[Tensor]) -> Tensor:
        """Apply a function to each whole parameter on its owner, and return the results as a flat tensor. A collective.

        Divided parameters are exchanged in rounds of at most one per owner: the memory is that of two of them.

        Args:
            function: Given the parameter's number and its whole tensor of each of ``flats``, on :attr:`device`; returns
                a tensor of their shape and dtype.
            flats: This rank's flat tensors, of one dtype.

        Returns:
            Tensor like each of ``flats``; 0 where no parameter lies.
        """
        result = torch.zeros_like(flats[0])
        for number in self.whole:
            parts = [self.own_part(number, flat).view(self.shapes[number]).to(self.device) for flat in flats]
            self.own_part(number, result).copy_(function(number, *parts).flatten())
        for numbers in self.rounds:
            own = numbers[self.rank]
            received = self._send_to_owners(numbers, flats)
            answer = None if own is None else function(own, *received).flatten()
            parts = self._send_back(own, numbers, answer, flats[0])
            for owned, part in zip(numbers, parts, strict=True):
                if owned is not None:
                    self.own_part(owned, result).copy_(part)
        return result

    def _send_to_owners(self, numbers: Sequence[int | None], flats: Sequence[Tensor]) -> list[Tensor]:
        """Each owner's parameter of a round, whole, of each of ``flats``; empty without one."""
        sent = [
            torch.cat([self.own_part(number, flat) for flat in flats]) if number is not None else flats[0][:0]
            for number in numbers
        ]
        own = numbers[self.rank]
        lengths = [0] * len(numbers) if own is None else [part.length for part in self.fragments[own]]
        received = self._exchange(sent, [len(flats) * length for length in lengths])
        if own is None:
            return []
        parts = [torch.split(part, length) for part, length in zip(received, lengths, strict=True) if length]
        return [torch.cat(of_flat).view(self.shapes[own]) for of_flat in zip(*parts, strict=True)]

    def _send_back(
        self, own: int | None, numbers: Sequence[int | None], answer: Tensor | None, like: Tensor
    ) -> list[Tensor]:
        """This rank's parts of the results of a round, by owner."""
        if own is None or answer is None:
            sent = [like[:0] for _ in numbers]
        else:
            sent = list(torch.split(answer, [part.length for part in self.fragments[own]]))
        lengths = [0 if number is None else self.fragments[number][self.rank].length for number in numbers]
        return self._exchange(sent, lengths)

    def _exchange(self, sent: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Send a tensor to each rank and receive one of the given length from each. A collective."""
        joined = torch.cat([part.to(self.device) for part in sent])
        received = joined.new_empty(sum(lengths))
        dist.all_to_all_single(received, joined, list(lengths), [len(part) for part in sent], group=self.group)
        return list(torch.split(received, list(lengths)))


def _work(shape: Sequence[int]) -> int:
    """Of a parameter's owner: the multiplications of its product with its transpose."""
    return prod(shape) * min(shape, default=1)
