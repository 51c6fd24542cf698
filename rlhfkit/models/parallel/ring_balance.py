"""Which rank gets which tokens of a packed row in a ring, and what that costs: counted, not timed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfkit.models.attention.layout import CPU, PackedLayout
from rlhfkit.models.parallel.ring_plan import RowVisibility, hops_of

LONG = (None, 1.0, 0.5)
"""From how many tokens on a sequence is dealt to all ranks, in shares N / P; ``None``: none is."""
WORTH = 1.45
"""How often the least work waited for is accepted of dealing that leaves more sequences together; less than the 1.5 of
one sequence in two halves. A sequence that all ranks share sends its keys to all, and makes tiles in which less is
visible: in rows of 16 random lengths on 8 ranks 30 % of the pairs of computed tiles instead of 50 %."""


def balanced_blocks(layout: PackedLayout, parts: int) -> list[Tensor]:
    """Deal the tokens of a packed row to ``parts`` ranks: equally many, up to a few, and of nearly equal causal work.

    Each long sequence is cut into 2 * parts pieces, of which rank r gets pieces r and 2 * parts - 1 - r: the zigzag of
    Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2) and of Zhu's ring-flash-attention
    (github.com/zhuzilin/ring-flash-attention). Brandon et al. 2023 (arXiv 2311.09431) deal single tokens in turn to the
    same end, which would leave every tile with a mask. The others follow one another and are cut where a rank is full,
    as their keys then travel to a neighbour at most. From which length on a sequence is long is decided by counting.

    Returns:
        For each rank the ascending indices of its tokens in the row, int64 on the CPU; some are empty if there are
        fewer tokens than ranks.
    """
    row = RowVisibility(layout)
    share = len(layout.tokens) / parts
    dealt = [_dealt(layout, parts, None if long is None else long * share) for long in LONG]
    waits = [_longest_steps(row.visible_pairs(blocks, None)) for blocks in dealt]
    return next(blocks for blocks, wait in zip(dealt, waits, strict=True) if wait <= WORTH * min(waits))


def _dealt(layout: PackedLayout, parts: int, long: float | None) -> list[Tensor]:
    """Deal sequences with at least ``long`` tokens of their own in zigzag, the others one after another."""
    counts = [length - prefix for length, prefix in zip(layout.lengths, layout.prefixes, strict=True)]
    tokens = torch.arange(sum(counts), device=CPU)
    pieces: list[list[Tensor]] = [[] for _ in range(parts)]
    others = [tokens[:0]]
    for number, own in enumerate(torch.split(tokens, counts)):
        if long is None or len(own) < long:
            others.append(own)
            continue
        cut = own.tensor_split(2 * parts)
        for rank in range(parts):  # another rank begins each time: the first pieces are longer by a token
            pieces[(rank + number) % parts] += [cut[rank], cut[-1 - rank]]
    sizes = [sum(map(len, of_rank)) for of_rank in pieces]
    for of_rank, rest in zip(
        pieces, torch.split(torch.cat(others), _filled(sizes, sum(map(len, others)))), strict=True
    ):
        of_rank.append(rest)
    return [torch.cat(of_rank).sort().values for of_rank in pieces]


def _filled(sizes: list[int], count: int) -> list[int]:
    """How many of ``count`` tokens each rank gets so that all have as equally many as can be."""
    given = [0] * len(sizes)
    total = sum(sizes) + count
    for rank in range(len(sizes)):
        even = total * (rank + 1) // len(sizes) - total * rank // len(sizes)
        given[rank] = min(max(even - sizes[rank], 0), count - sum(given))
    given[-1] += count - sum(given)
    return given


def _longest_steps(pairs: Tensor) -> int:
    """The work of the rank with most, summed over the steps of the ring; at least 1."""
    count = len(pairs)
    steps = ([int(pairs[rank, (rank - step) % count]) for rank in range(count)] for step in range(count))
    return max(sum(map(max, steps)), 1)


@dataclass(frozen=True)
class RingCosts:
    """Of one attention layer."""

    pairs: tuple[int, ...]
    """Visible pairs of a query and a key of each rank: its work."""
    busy: float
    """The part of the time in which an average rank computes, if in each step all wait for the one with most work and
    messages cost nothing; 1: evenly divided."""
    sent_tokens: int
    """Tokens whose keys and values are passed on to another rank, once for each time: the forward pass of all ranks."""
    returned_tokens: int
    """Tokens whose gradients return to their rank in the backward pass, after they have gone the way of the keys."""

    def sent_bytes(self, key_heads: int, key_size: int, value_size: int, bytes_per_number: int) -> tuple[int, int]:
        """Bytes that all ranks together send in the forward and in the backward pass.

        In the backward pass keys and values go around again with their gradients, which are in float32, or in float64
        if keys are.
        """
        numbers = key_heads * (key_size + value_size)
        forward = self.sent_tokens * numbers * bytes_per_number
        gradients = (self.sent_tokens + self.returned_tokens) * numbers * max(bytes_per_number, 4)
        return forward, forward + gradients


def ring_costs(layout: PackedLayout, blocks: Sequence[Tensor], window: int | None = None) -> RingCosts:
    """Count for a row and its division among ranks; ``blocks`` as in :class:`~rlhfkit.models.parallel.ring.Ring`."""
    pairs = RowVisibility(layout).visible_pairs(blocks, window)
    hops = hops_of(pairs)
    return RingCosts(
        tuple(pairs.sum(1).tolist()),
        int(pairs.sum()) / (len(blocks) * _longest_steps(pairs)),
        sum(hop * len(tokens) for hop, tokens in zip(hops, blocks, strict=True)),
        sum(len(tokens) for hop, tokens in zip(hops, blocks, strict=True) if hop),
    )
