"""``UlyssesAttention``: attention over a row whose tokens lie on several ranks, each with all tokens of some heads.

Before attention the ranks exchange tokens for heads, and after it heads for tokens (Jacobs et al. 2023, arXiv
2309.14509), so attention itself is that of one rank with fewer heads.

Shapes: N tokens of the row, n of this rank, P ranks, D numbers per head.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout, WholeAttention


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention of a rank that has chunk ``rank`` of the row's tokens, in the order of the row."""

    sizes: tuple[int, ...]
    """Tokens of each rank."""
    rank: int
    group: Any
    """Process group of the ranks, by chunk."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        whole: WholeAttention,
        options: AttentionOptions,
    ) -> Tensor:
        """(n, heads, D) from ``query`` (heads, n, D) and ``key`` and ``value`` with key heads; see SharedAttention.

        The ranks divide the query heads, which strategies check. Fewer key heads than ranks are repeated, as in grouped
        attention each rank needs those of its query heads.
        """
        ranks, own = len(self.sizes), self.sizes[self.rank]
        copies = math.lcm(len(key), ranks) // len(key)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 0) for x in (key, value))
        # For each rank its heads of all three, side by side: (P, n, numbers).
        shares = [
            x.reshape(ranks, x.shape[0] // ranks, own, x.shape[2]).transpose(1, 2).flatten(2)
            for x in (query, key, value)
        ]
        sent = torch.cat(shares, 2).flatten(0, 1)
        send, receive = (own,) * ranks, self.sizes
        received = _exchanged(sent, send, receive, self.group)  # (N, numbers)
        mine = torch.split(received, [share.shape[2] for share in shares], 1)
        query, key, value = (
            part.view(len(part), -1, x.shape[2]).transpose(0, 1)  # (heads / P, N, D)
            for part, x in zip(mine, (query, key, value), strict=True)
        )
        out = whole(query, key, value)  # (N, heads / P, D)
        back = _exchanged(out.flatten(1), receive, send, self.group)  # (P * n, numbers)
        return back.view(ranks, own, *out.shape[1:]).transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` of rows: ``send[i]`` rows to rank i, ``receive[i]`` from it, in this order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> Tensor:
        ctx.arguments = (send, receive, group)
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.arguments
        return _exchanged(gradients[0], receive, send, group), None, None, None


def _exchanged(rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Any) -> Tensor:
    found: Tensor = cast(Any, _Exchange).apply(rows, send, receive, group)  # torch leaves it without types
    return found
