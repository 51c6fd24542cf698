"""Ring attention over a packed row: each rank has some of its tokens, and keys and values go around the ranks.

Liu et al. 2023 (arXiv 2310.01889). No rank needs more than one head, so the number of ranks is limited by the number of
tokens only. While a rank computes with one block of keys and values, the next one travels. In the backward pass keys
and values go around again, with their gradients, to which each rank adds its part. Results of tiles are joined by their
log-sum-exp (Milakov & Gimelshein 2018, arXiv 1805.02867); the backward pass recomputes probabilities from it, as
FlashAttention-2 (Dao 2023, arXiv 2307.08691) does. Plain PyTorch, right on every device.

Shapes: G query heads per key head, q queries and k keys of a tile, D and E the sizes of keys and values.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhfkit.models.attention.layout import CPU, AttentionOptions, PackedLayout, WholeAttention, send_together

TILE_SCORES = 2**24
"""Scores of all heads that are in memory at once, at most (64 MiB in float32); the backward pass has them twice."""
_NOTHING = -1e30  # log-sum-exp of a query that sees no key; finite, as a difference of two infinite ones would be NaN


def zigzag_blocks(layout: PackedLayout, parts: int) -> list[Tensor]:
    """Deal the tokens of a packed row to ``parts`` ranks: equally many, up to a few, and of nearly equal causal work.

    Each sequence is cut into 2 * parts pieces, of which a rank gets one from the front and its counterpart from the
    end: the zigzag of Llama 3 (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2). Returns for each rank the
    ascending indices (n,) of its tokens in the row, int64 on the CPU; some are empty if there are few tokens.
    """
    pieces: list[list[Tensor]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for own in torch.split(torch.arange(sum(layout.counts), device=CPU), layout.counts):
        cut = own.tensor_split(2 * parts)
        pairs = sorted((torch.cat([cut[i], cut[-1 - i]]) for i in range(parts)), key=len, reverse=True)
        for rank, pair in zip(sorted(range(parts), key=sizes.__getitem__), pairs, strict=True):
            pieces[rank].append(pair)
            sizes[rank] += len(pair)
    return [torch.cat(of_rank).sort().values for of_rank in pieces]


class Visibility(NamedTuple):
    """What decides which tokens of a packed row see one another; each (n,) int64."""

    first: Tensor
    """The sequence that the token was computed for, the first that has it."""
    last: Tensor
    """The last sequence that has the token, as part of a shared prefix."""
    position: Tensor  # in its sequence, from 0

    @classmethod
    def of_row(cls, layout: PackedLayout) -> "Visibility":
        """Of all N tokens of a row, on the CPU."""
        lengths, prefixes = (torch.tensor(x, device=CPU) for x in (layout.lengths, layout.prefixes))
        own = lengths - prefixes
        first = torch.arange(len(own), device=CPU).repeat_interleave(own)
        position = torch.arange(len(first), device=CPU) - (own.cumsum(0) - own - prefixes)[first]
        real = torch.arange(layout.places.shape[1], device=CPU) < lengths[:, None]
        last = first.clone().scatter_reduce_(0, layout.places[real], real.nonzero()[:, 0], "amax")
        return cls(first, last, position)

    def of(self, tokens: Tensor | slice) -> "Visibility":
        """Of some tokens."""
        return Visibility(*(numbers[tokens] for numbers in self))

    def mask(self, keys: "Visibility", window: int | None) -> Tensor:
        """(queries, keys) bool, true where a query (self) sees a key: of its sequence, not later, in the window."""
        sequence, distance = self.first[:, None], self.position[:, None] - keys.position
        seen = (keys.first <= sequence) & (sequence <= keys.last) & (distance >= 0)
        return seen if window is None else seen & (distance < window)


Tile = tuple[slice, slice]  # queries of this rank and keys of one block that are computed together


def tiles_of(starts: Tensor, queries: Tensor, keys: Tensor, size: int) -> list[Tile]:
    """Tiles of at most ``size`` queries and keys, without those in which all keys are later or of earlier sequences.

    ``queries`` and ``keys`` are ascending indices into the row of N tokens; ``starts`` (N,) where each token's
    sequence, its prefix included, begins in the row.
    """
    tiles = []
    for start in range(0, len(queries), size):
        chosen = queries[start : start + size]
        bounds = torch.tensor([int(starts[chosen].min()), int(chosen[-1]) + 1], device=CPU)
        since, until = torch.searchsorted(keys, bounds).tolist()
        for key in range(since, until, size):
            tiles.append((slice(start, start + len(chosen)), slice(key, min(key + size, until))))
    return tiles


def tile_size(heads: int) -> int:
    """The largest power of two so that a square tile of all heads has at most :data:`TILE_SCORES`, from 64 to 2048."""
    return min(2048, max(64, int(2 ** (((TILE_SCORES // heads).bit_length() - 1) // 2))))


@dataclass(frozen=True, eq=False)
class RingAttention:
    """Attention of the rank that has ``blocks[rank]`` of a row's tokens; made once per forward pass, on all ranks."""

    blocks: tuple[Tensor, ...]
    """For each rank the ascending indices of its tokens in the row, int64 on the CPU."""
    rank: int
    group: Any
    """Process group of the ranks, by block; ``None`` if this rank has all."""
    tile: int | None = None  # queries and keys of a tile; None: tile_size
    _tiles: dict[int, list[list[Tile]]] = field(default_factory=dict, init=False)  # by size, of each block
    _visibility: list[Visibility] = field(default_factory=list, init=False)  # of each block

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: PackedLayout,
        whole: WholeAttention | None,
        options: AttentionOptions,
    ) -> Tensor:
        """(n, heads, E) in the dtype of the queries; see :class:`~rlhfkit.models.attention.layout.SharedAttention`.

        Raises:
            ValueError: If attention probabilities are to be dropped.
        """
        if options.dropout:
            raise ValueError(
                f"ring attention has no dropout of attention probabilities ({options.dropout:g}): set "
                "attention_dropout=0 in the model's config, or use sequence_parallel='ulysses'"
            )
        size = self.tile or tile_size(query.shape[0])
        if size not in self._tiles:
            row, own = Visibility.of_row(layout), self.blocks[self.rank]
            starts = layout.places[row.first, 0]
            self._tiles[size] = [tiles_of(starts, own, block, size) for block in self.blocks]
            sent = send_together([numbers for block in self.blocks for numbers in row.of(block)], query.device)
            self._visibility[:] = (Visibility(*sent[i : i + 3]) for i in range(0, len(sent), 3))
        scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        tensors = (query, key.to(query.dtype), value.to(query.dtype))
        # torch leaves apply without types
        out: Tensor = cast(Any, _RingAttention).apply(*tensors, self, self._tiles[size], scale, options.window)
        return out.transpose(0, 1)

    def block(self, step: int) -> int:
        """The block that this rank has at a step."""
        return (self.rank - step) % len(self.blocks)

    def mask(self, tile: Tile, block: int, window: int | None) -> Tensor:
        """(q, k) bool of a tile of ``block``."""
        return self._visibility[self.rank].of(tile[0]).mask(self._visibility[block].of(tile[1]), window)

    def pass_on(self, step: int, sent: Tensor, tag: int) -> tuple[list[Any], Tensor]:
        """Send what belongs to this step's block to the next rank; returns what will be that of the next step's.

        ``tag`` tells messages between two ranks apart that are under way at the same time, which gloo needs.
        """
        ranks, operations = dist.get_process_group_ranks(self.group), []
        received = sent.new_empty(sent.shape[0], len(self.blocks[self.block(step + 1)]), sent.shape[2])
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, ranks[(self.rank + 1) % len(ranks)], self.group, tag))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, ranks[self.rank - 1], self.group, tag))
        return (dist.batch_isend_irecv(operations) if operations else []), received


class _RingAttention(torch.autograd.Function):
    """(heads, n, E) from queries, keys and values of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: RingAttention, *plan: Any) -> Tensor:
        tiles, scale, window = plan
        sizes, queries, count = [key.shape[-1], value.shape[-1]], _grouped(query, key.shape[0]), len(ring.blocks)
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = queries.new_zeros((*queries.shape[:3], sizes[1]), dtype=dtype)
        logsumexp = out.new_full(out.shape[:3], _NOTHING)
        block = torch.cat([key, value], -1)
        with torch.autocast(query.device.type, enabled=False):
            for step in range(count):
                works, following = ring.pass_on(step, block, 0) if step + 1 < count else ([], block)
                number = ring.block(step)
                for tile in tiles[number]:
                    keys, values = torch.split(block[:, tile[1]].to(dtype), sizes, -1)
                    scores = _scores(queries[:, :, tile[0]].to(dtype), keys, ring.mask(tile, number, window), scale)
                    of_tile = scores.logsumexp(-1).clamp_min(_NOTHING)
                    joined = torch.logaddexp(logsumexp[:, :, tile[0]], of_tile)
                    weights = scores.sub_(joined[..., None]).exp_()
                    out[:, :, tile[0]] *= (logsumexp[:, :, tile[0]] - joined).exp_()[..., None]
                    out[:, :, tile[0]] += (weights.flatten(1, 2) @ values).view(*weights.shape[:3], -1)
                    logsumexp[:, :, tile[0]] = joined
                for work in works:
                    work.wait()
                block = following
        result = out.flatten(0, 1).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        ctx.ring, ctx.plan = ring, plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, logsumexp = ctx.saved_tensors
        ring, (tiles, scale, window), dtype = ctx.ring, ctx.plan, logsumexp.dtype
        sizes, count = [key.shape[-1], value.shape[-1]], len(ring.blocks)
        queries, grads = (_grouped(x, key.shape[0]).to(dtype) for x in (query, grad))
        product = (grad.to(dtype) * result.to(dtype)).sum(-1).view_as(logsumexp)
        to_query, block = torch.zeros_like(queries), torch.cat([key, value], -1)
        under_way: list[Any] = []  # gradients
        to_block = block.new_zeros(block.shape, dtype=dtype)  # of the block of the step, from the ranks before
        with torch.autocast(query.device.type, enabled=False):
            for step in range(count):
                works, following = ring.pass_on(step, block, 0) if step + 1 < count else ([], block)
                number = ring.block(step)
                own_part = block.new_zeros(block.shape, dtype=dtype)
                for tile in tiles[number]:
                    keys, values = torch.split(block[:, tile[1]].to(dtype), sizes, -1)
                    of_queries, of_grads = (x[:, :, tile[0]].flatten(1, 2) for x in (queries, grads))
                    scores = _scores(queries[:, :, tile[0]], keys, ring.mask(tile, number, window), scale)
                    weights = scores.sub_(logsumexp[:, :, tile[0], None]).exp_()
                    to_value = weights.flatten(1, 2).mT @ of_grads
                    slopes = (of_grads @ values.mT).view_as(weights).sub_(product[:, :, tile[0], None])
                    slopes = slopes.mul_(weights).mul_(scale).flatten(1, 2)
                    to_query[:, :, tile[0]] += (slopes @ keys).view_as(queries[:, :, tile[0]])
                    own_part[:, tile[1]] += torch.cat([slopes.mT @ of_queries, to_value], -1)
                for work in under_way:
                    work.wait()
                sent = to_block.add_(own_part)
                under_way, to_block = ring.pass_on(step, sent, 1) if count > 1 else ([], sent)
                for work in works:
                    work.wait()
                block = following
            for work in under_way:
                work.wait()
        to_key, to_value = torch.split(to_block, sizes, -1)
        return to_query.view_as(query).to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), *(None,) * 4


def _grouped(heads: Tensor, key_heads: int) -> Tensor:
    """(heads, n, D) as (key heads, G, n, D)."""
    return heads.reshape(key_heads, heads.shape[0] // key_heads, *heads.shape[1:])


def _scores(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(key heads, G, q, k), minus infinity where a key is not seen."""
    scores = (query.flatten(1, 2) @ key.mT).view(*query.shape[:3], -1).mul_(scale)
    return scores.masked_fill_(~mask, -torch.inf)
