"""``RingAttention``: attention over a row whose tokens lie on several ranks, whose keys and values go around them.

The hybrid (USP, Fang & Zhao 2024, arXiv 2405.07719) lets neighbours exchange tokens for heads first, as far as there
are heads, so that fewer and larger blocks go around.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.models.attention.layout import PackedLayout, WholeAttention, send_together
from rlhfkit.models.parallel.ring import Ring, ring_attention
from rlhfkit.models.parallel.ulysses import UlyssesAttention


@dataclass(frozen=True, eq=False)
class RingAttention:
    """Attention of the rank that has ``blocks[rank]`` of a row's tokens."""

    blocks: tuple[Tensor, ...]
    """For each sequence rank the indices of its tokens in the row, int64 on the CPU."""
    rank: int
    group: Any
    """Process group of the ranks, by block."""
    exchange_heads: bool = False
    """Whether neighbours exchange tokens for heads first: the hybrid."""
    _rings: dict[int, Ring] = field(default_factory=dict, init=False, repr=False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        whole: WholeAttention,
        *,
        scaling: float | None,
        dropout: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See :class:`~rlhfkit.models.attention.layout.SharedAttention`.

        Raises:
            ValueError: If attention probabilities are to be dropped.
        """
        if dropout:
            raise ValueError(
                f"ring attention has no dropout of attention probabilities ({dropout:g}): set attention_dropout=0 in "
                "the model's config, or use sequence_parallel='ulysses'"
            )
        neighbours = exchanging_ranks(query.shape[0], len(self.blocks)) if self.exchange_heads else 1
        if neighbours not in self._rings:
            self._rings[neighbours] = self._ring(layout, neighbours)
        ring = self._rings[neighbours]

        def of_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if neighbours == len(self.blocks):
                return in_order(query, key, value, ring.blocks[0], whole)
            return ring_attention(query, key, value, ring, scaling=scaling, window=sliding_window)

        if neighbours == 1:
            return of_heads(query, key, value)
        first = self.rank - self.rank % neighbours
        members = range(first, first + neighbours)
        exchange = UlyssesAttention(
            tuple(len(self.blocks[member]) for member in members), self.rank - first, self.group, members
        )
        options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return exchange(query, key, value, layout, of_heads, **options)

    def _ring(self, layout: PackedLayout, neighbours: int) -> Ring:
        """The ring of the ranks that have the same heads, if groups of so many neighbours exchange tokens for heads."""
        starts = range(0, len(self.blocks), neighbours)
        blocks = tuple(torch.cat(self.blocks[start : start + neighbours]) for start in starts)
        ranks = dist.get_process_group_ranks(self.group)
        same_heads = tuple(ranks[start + self.rank % neighbours] for start in starts)
        return Ring(layout, blocks, self.rank // neighbours, same_heads, self.group)


def exchanging_ranks(heads: int, ranks: int) -> int:
    """How many neighbours exchange tokens for heads: as many as divide both the ranks and the query heads."""
    return math.gcd(heads, ranks)


def in_order(query: Tensor, key: Tensor, value: Tensor, tokens: Tensor, whole: WholeAttention) -> Tensor:
    """Attention over a whole row whose tokens are in another order: those at ``tokens`` of the row."""
    order, places = send_together([tokens, tokens.argsort()], query.device)
    return whole(query[:, places], key[:, places], value[:, places])[order]
