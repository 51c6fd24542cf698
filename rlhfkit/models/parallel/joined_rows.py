"""``JoinedRow``: the packed rows of a forward group's members as one row, of which each rank computes some tokens.

Every member brings a micro-batch of its own. The members tell one another the tokens and lengths of their sequences,
so each can plan the whole row; each sequence rank then runs the model on its part of the tokens, and the numbers of
the selected tokens go back to the members whose tokens they are (:meth:`JoinedRow.to_owners`). Ranks that have another
part of the weights but the same place in the sequence compute the same tokens.

Shapes: N tokens of the joined row, M selected ones; n and m are those that this rank computes, M_i a member's own.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.mesh import ForwardGroup
from rlhfkit.models.attention.layout import CPU, PackedLayout, SharedAttention, send_together
from rlhfkit.models.parallel.ring import RingAttention, zigzag_blocks
from rlhfkit.models.parallel.ulysses import UlyssesAttention


class OwnRow(NamedTuple):
    """What a member brings to a joined row; tensors are on the CPU.

    Attributes:
        lengths: Tokens of each sequence.
        prefixes: Leading tokens that each sequence shares with the one before it.
        tokens: (N_i,) int64, the packed row.
        positions: (M_i,) int64, index in the row of each selected token.
        following: (M_i,) int64, the token after each selected one in its sequence; any number where there is none.
        request: What is asked of the forward pass, the same for all members.
        problem: Why its batch cannot be computed, which is then an error of all members; empty: it can.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    following: Tensor
    request: tuple[Any, ...]
    problem: str = ""


def deal_tokens(layout: PackedLayout, group: ForwardGroup) -> tuple[Tensor, SharedAttention | None]:
    """Which tokens of a packed row this rank computes, and how attention sees those of other sequence ranks.

    Returns:
        Their index (n,) int64 on the CPU, and ``None`` if there is one part only. ``ulysses``: chunks of the row that
        differ by one token at most; a part may be empty. ``ring``: see
        :func:`~rlhfkit.models.parallel.ring.zigzag_blocks`.
    """
    rank, every = group.mesh.sequence_rank, torch.arange(sum(layout.counts), device=CPU)
    if group.sequence is None:
        return every, None
    if group.sequence_parallel == "ulysses":
        chunks = every.tensor_split(group.mesh.sequence)
        return chunks[rank], UlyssesAttention(tuple(map(len, chunks)), rank, group.sequence)
    blocks = zigzag_blocks(layout, group.mesh.sequence)
    return blocks[rank], RingAttention(tuple(blocks), rank, group.sequence)


@dataclass(frozen=True)
class JoinedRow:
    """The part of a joined row that this rank computes, and the way of its results to their owners."""

    group: ForwardGroup
    arguments: dict[str, Any]
    """Of the unwrapped model, for this rank's part: ``input_ids`` (1, n), ``position_ids`` and ``packed_layout``."""
    positions: Tensor
    """(m,) int64, index in the part of each selected token that this rank computes."""
    following: Tensor
    """(m,) int64, the token after each of them."""
    selected: Tensor
    """(m,) int64, index of each of them among the M of all members, by member."""
    counts: tuple[int, ...]
    """Selected tokens of each member."""
    computed: tuple[slice, ...]
    """Those of each member among the m that this rank computes."""
    members: Tensor
    """(n,) int64, the member whose each token of this rank's part is."""

    @property
    def own(self) -> slice:
        """This rank's own tokens among the M of all members."""
        start = sum(self.counts[: self.group.mesh.member])
        return slice(start, start + self.counts[self.group.mesh.member])

    def to_owners(self, computed: Tensor) -> Tensor:
        """Numbers (M_i, ...) of this rank's own tokens from those (m, ...) that each rank has computed. A collective.

        So is its backward pass, which hands each rank the gradients of all members' losses for what it computed.
        """
        return _to_owners(computed, self.selected, sum(self.counts), self.own, self.group)

    def sums_to_owners(self, sums: Tensor) -> Tensor:
        """This rank's own sums (...) over its tokens, from those (members, ...) over what each rank has computed.

        A collective with its backward pass, as :meth:`to_owners`.
        """
        members, member = self.group.mesh.forward_group_size, self.group.mesh.member
        return _to_owners(sums, slice(0, members), members, slice(member, member + 1), self.group)[0]

    def from_owners(self, own: Tensor) -> Tensor:
        """(m, ...) of the tokens that this rank computes from (M_i, ...) of each rank's own; no gradient. A collective.

        ``own`` has the same dtype and trailing sizes on all members.
        """
        return _summed_parts(own, self.own, sum(self.counts), self.group.members)[self.selected]


def join_rows(group: ForwardGroup, own: OwnRow, device: torch.device) -> JoinedRow:
    """Exchange the members' rows and plan this rank's part of them. A collective of the members.

    Raises:
        RuntimeError: If the members are in different forward passes.
        ValueError: If the batch of one cannot be computed.
    """
    rows = group.gather(own)
    for row in rows:
        if row.problem:
            raise ValueError(row.problem)
    requests = {row.request for row in rows}
    if len(requests) > 1:
        raise RuntimeError(
            f"the {len(rows)} ranks of a forward group are in different forward passes ({sorted(map(str, requests))}): "
            "all must make the same ones in the same order; one without rows brings a batch without targets"
        )
    layout = PackedLayout.from_lengths(
        [length for row in rows for length in row.lengths],
        device,
        [prefix for row in rows for prefix in row.prefixes],
    )
    part, shared = deal_tokens(layout, group)
    layout = replace(layout, shared=shared)

    starts = [sum(len(row.tokens) for row in rows[:member]) for member in range(len(rows))]
    everywhere = torch.cat([row.positions + start for row, start in zip(rows, starts, strict=True)])
    places = torch.full((sum(layout.counts),), -1, dtype=torch.int64, device=CPU)
    places[part] = torch.arange(len(part), device=CPU)
    selected = (places[everywhere] >= 0).nonzero()[:, 0]
    following = torch.cat([row.following for row in rows])[selected]
    counts = tuple(len(row.positions) for row in rows)
    ends = torch.searchsorted(selected, torch.tensor([0, *counts], device=CPU).cumsum(0)).tolist()
    computed = tuple(slice(*pair) for pair in pairwise(ends))
    tokens = torch.cat([row.tokens for row in rows])[part]
    members = torch.arange(len(rows), device=CPU).repeat_interleave(
        torch.tensor([len(row.tokens) for row in rows], device=CPU)
    )[part]
    tokens, part, positions, following, selected, members = send_together(
        [tokens, part, places[everywhere[selected]], following, selected, members], device
    )
    arguments: dict[str, Any] = {
        "input_ids": tokens[None],
        "position_ids": layout.position_ids[:, part],
        "packed_layout": layout,
    }
    return JoinedRow(group, arguments, positions, following, selected, counts, computed, members)


def _summed_parts(part: Tensor, places: Tensor | slice, count: int, ranks: Any) -> Tensor:
    """(count, ...) from the rows that each rank of a group has at its ``places``; others are 0, so sums are exact."""
    whole = part.new_zeros(count, *part.shape[1:])
    whole[places] = part
    if ranks is not None and whole.numel():
        dist.all_reduce(whole, group=ranks)
    return whole


class _ToOwners(torch.autograd.Function):
    """The sum over ranks of d(own loss) is the gradient of the sum of all members' losses: each rank gets, for the
    tokens it computes, the gradients of whoever owns them.

    Ranks of a tensor group compute the same tokens, and DeepSpeed averages gradients over the others only, so each of
    them takes an equal share.
    """

    @staticmethod
    def forward(
        ctx: Any, computed: Tensor, places: Tensor | slice, count: int, own: slice, group: ForwardGroup
    ) -> Tensor:
        ctx.arguments = (places, count, own, group)
        return _summed_parts(computed, places, count, group.sequence)[own].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        places, count, own, group = ctx.arguments
        part, share = _summed_parts(gradients[0], own, count, group.members)[places], group.mesh.tensor
        return part if share == 1 else part / share, None, None, None, None


def _to_owners(computed: Tensor, places: Tensor | slice, count: int, own: slice, group: ForwardGroup) -> Tensor:
    found: Tensor = cast(Any, _ToOwners).apply(computed, places, count, own, group)  # torch leaves it without types
    return found
