"""Ring attention over a packed row: each rank has some of its tokens, and keys and values go around the ranks.

Liu et al. 2023 (arXiv 2310.01889). No rank has all tokens, and none needs more than one head: the number of ranks is
limited by the number of tokens only. While a rank computes with one block of keys and values, the next one travels.
In the backward pass keys and values go around again, with their gradients, to which each rank adds its part.

A block travels only as far as there is a rank with a query that sees one of its keys: packed rows of many short
sequences, or with a window, exchange little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.parallel.ring_plan import RingPlan, RowVisibility
from rlhfkit.models.parallel.ring_tiles import NOTHING, PLAIN, TileFunctions, join_, sum_dtype

TILE_SCORES = 2**24
"""Scores of all heads that are in memory at once, at most (64 MiB in float32); the backward pass has them twice."""


@dataclass(frozen=True, eq=False)
class Ring:
    """A ring of P ranks over one packed row, made once per forward pass.

    All ranks must make it from the same layout and blocks, and call :func:`ring_attention` equally often.
    """

    layout: PackedLayout
    blocks: tuple[Tensor, ...]
    """For each place in the ring the indices of its tokens in the row, int64 on the CPU; together all, each once."""
    place: int
    """This rank's, from 0."""
    ranks: tuple[int, ...]
    """The global rank of each place."""
    group: Any
    """A process group that has them all; ``None``: the default group."""
    tile: int | None = None
    """Queries and keys of a tile; ``None``: :func:`tile_size`."""

    @classmethod
    def of_group(cls, layout: PackedLayout, blocks: Sequence[Tensor], group: Any) -> "Ring":
        """The ranks of a group in its order; ``None``: this rank alone."""
        if group is None:
            return cls(layout, tuple(blocks), 0, (0,), None)
        return cls(layout, tuple(blocks), dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), group)

    @cached_property
    def row(self) -> RowVisibility:
        """What is visible in the row."""
        return RowVisibility(self.layout)

    @cached_property
    def _plans(self) -> dict[tuple[int | None, int, torch.device], RingPlan]:
        return {}

    def plan(self, window: int | None, heads: int, device: torch.device) -> RingPlan:
        """The tiles for a layer; layers that are alike share them."""
        key = (window, self.tile or tile_size(heads), device)
        if key not in self._plans:
            self._plans[key] = RingPlan.of_row(self.row, self.blocks, self.place, *key)
        return self._plans[key]


def tile_size(heads: int) -> int:
    """The largest power of two so that a square tile of all heads has at most :data:`TILE_SCORES`, from 64 to 2048."""
    size = 64
    while size < 2048 and heads * (2 * size) ** 2 <= TILE_SCORES:
        size *= 2
    return size


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    *,
    scaling: float | None = None,
    window: int | None = None,
    tiles: TileFunctions = PLAIN,
) -> Tensor:
    """Causal attention of this rank's queries to all tokens of the row that they see. A collective of the ring.

    Args:
        query: (heads, n, D) of this rank's n tokens, which may be none.
        key: (key heads, n, D); ``heads`` is a multiple of ``key heads``.
        value: (key heads, n, E).
        ring: Who has which tokens.
        scaling: Factor of the scores, 1/sqrt(D) when ``None``.
        window: Tokens that a query sees, its own included; ``None``: all before it.
        tiles: How a tile is computed.

    Returns:
        (n, heads, E) in the dtype of the queries.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = ring.plan(window, query.shape[0], query.device)
    key, value = key.to(query.dtype), value.to(query.dtype)
    # torch leaves apply without types
    out: Tensor = cast(Any, _RingAttention).apply(query, key, value, _Travel(ring, plan), scale, tiles)
    return out.transpose(0, 1)


@dataclass(frozen=True)
class _Exchange:
    """Messages under way."""

    works: list[Any]
    sent: Tensor | None
    """Kept until it has been sent."""
    received: Tensor | None
    """What belongs to the block of the next step."""
    returned: Tensor | None = None
    """The gradients of this rank's own block, from the rank where its travel has ended."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True, eq=False)
class _Travel:
    """Who sends what to whom: at step s the rank at place p has the block of place p - s, if it travels so far."""

    ring: Ring
    plan: RingPlan

    @property
    def steps(self) -> range:
        return range(max(self.plan.hops) + 1)

    def block(self, step: int) -> int:
        """The block that this rank has at a step."""
        return (self.plan.own - step) % len(self.plan.sizes)

    def pass_on(self, step: int, block: Tensor | None, like: Tensor) -> _Exchange:
        """Send keys and values of this step's block to the next rank, and receive those of the next step's."""
        operations, received = self._neighbours(step, block, like, tag=0)
        return _Exchange(_started(operations), block, received)

    def pass_gradients_on(self, step: int, gradients: Tensor | None, like: Tensor) -> _Exchange:
        """The same for the gradients of this step's block, which return to its own rank where its travel ends."""
        # gloo tells messages between two ranks apart by their tag; keys and gradients are under way at the same time.
        operations, received = self._neighbours(step, gradients, like, tag=1)
        plan, number, returned = self.plan, self.block(step), None
        if step and plan.hops[number] == step:
            operations.append(self._operation(dist.isend, gradients, number, tag=1))
        if step and plan.hops[plan.own] == step:
            returned = self._empty(plan.own, like)
            operations.append(self._operation(dist.irecv, returned, plan.own + step, tag=1))
        return _Exchange(_started(operations), gradients, received, returned)

    def _neighbours(self, step: int, sent: Tensor | None, like: Tensor, tag: int) -> tuple[list[Any], Tensor | None]:
        hops, own, coming = self.plan.hops, self.plan.own, self.block(step + 1)
        operations, received = [], None
        if hops[self.block(step)] > step:
            operations.append(self._operation(dist.isend, sent, own + 1, tag))
        if hops[coming] > step:
            received = self._empty(coming, like)
            operations.append(self._operation(dist.irecv, received, own - 1, tag))
        return operations, received

    def _empty(self, block: int, like: Tensor) -> Tensor:
        return like.new_empty(like.shape[0], self.plan.sizes[block], like.shape[2])

    def _operation(self, kind: Any, tensor: Tensor | None, place: int, tag: int) -> Any:
        assert tensor is not None
        return dist.P2POp(kind, tensor, self.ring.ranks[place % len(self.ring.ranks)], self.ring.group, tag)


def _started(operations: list[Any]) -> list[Any]:
    works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
    return works


class _RingAttention(torch.autograd.Function):
    """(heads, n, E) from queries, keys and values of this rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, travel: _Travel, scale: float, tiles: TileFunctions
    ) -> Tensor:
        plan, sizes = travel.plan, [key.shape[-1], value.shape[-1]]
        queries = _grouped(query, key.shape[0])
        out = queries.new_zeros((*queries.shape[:3], sizes[1]), dtype=sum_dtype(query.dtype))
        logsumexp = out.new_full(out.shape[:3], NOTHING)
        own = torch.cat([key, value], -1)
        block: Tensor | None = own
        with torch.autocast(query.device.type, enabled=False):
            for step in travel.steps:
                exchange = travel.pass_on(step, block, own)
                number = travel.block(step)
                for tile in plan.tiles[number]:
                    assert block is not None
                    keys, values = torch.split(block[:, tile.keys], sizes, -1)
                    chosen = (slice(None), slice(None), tile.queries)
                    found = tiles.forward(queries[chosen], keys, values, plan.mask(tile, number), scale)
                    join_(out[chosen], logsumexp[chosen], *found)
                exchange.wait()
                block = exchange.received
        result = out.flatten(0, 1).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.travel, ctx.scale, ctx.tiles = travel, scale, tiles
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        travel: _Travel = ctx.travel
        sizes, dtype = [key.shape[-1], value.shape[-1]], logsumexp.dtype
        queries, grads = (_grouped(x, key.shape[0]) for x in (query, grad))
        product = (grad.to(dtype) * result.to(dtype)).sum(-1).view_as(logsumexp)
        to_query = torch.zeros_like(queries, dtype=dtype)

        def add_tiles(block: Tensor, number: int) -> Tensor:
            """Gradients of a block's keys and values by this rank's queries; those of the queries are added up."""
            to_block = torch.zeros_like(block, dtype=dtype)
            for tile in travel.plan.tiles[number]:
                keys, values = torch.split(block[:, tile.keys], sizes, -1)
                chosen = (slice(None), slice(None), tile.queries)
                tensors = (grads[chosen], queries[chosen], keys, values, travel.plan.mask(tile, number))
                parts = ctx.tiles.backward(*tensors, ctx.scale, logsumexp[chosen], product[chosen])
                to_query[chosen] += parts[0]
                to_block[:, tile.keys] += torch.cat(parts[1:], -1)
            return to_block

        with torch.autocast(query.device.type, enabled=False):
            to_own = _go_around(travel, torch.cat([key, value], -1), dtype, add_tiles)
        to_key, to_value = torch.split(to_own, sizes, -1)
        return to_query.view_as(query).to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), None, None, None


def _grouped(heads: Tensor, key_heads: int) -> Tensor:
    """(heads, n, D) as (key heads, heads of each, n, D)."""
    return heads.reshape(key_heads, heads.shape[0] // key_heads, *heads.shape[1:])


def _go_around(travel: _Travel, own: Tensor, dtype: torch.dtype, gradients: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Keys and values go around with their gradients, to which each rank adds its part; returns those of this rank's.

    ``gradients`` gives this rank's part from a block and its number.
    """
    like = own.new_empty((own.shape[0], 0, own.shape[2]), dtype=dtype)
    block: Tensor | None = own
    to_own: Tensor | None = None
    before: _Exchange | None = None
    for step in travel.steps:
        exchange = travel.pass_on(step, block, own)
        to_block = None if block is None else gradients(block, travel.block(step))
        if before is not None:
            before.wait()
            to_own = before.returned if to_own is None else to_own
            if to_block is not None and before.received is not None:
                to_block += before.received
        if step == 0 and travel.plan.hops[travel.plan.own] == 0:
            to_own = to_block  # no other rank sees a key of it
        before = travel.pass_gradients_on(step, to_block, like)
        exchange.wait()
        block = exchange.received
    assert before is not None
    before.wait()
    to_own = before.returned if to_own is None else to_own
    assert to_own is not None
    return to_own
