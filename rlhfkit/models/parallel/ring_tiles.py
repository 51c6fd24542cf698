"""Attention of one tile of queries to one tile of keys, with the log-sum-exp that joins the results of tiles.

Online softmax: Milakov & Gimelshein 2018 (arXiv 1805.02867); the backward pass recomputes probabilities from the
log-sum-exp over all keys, as FlashAttention-2 (Dao 2023, arXiv 2307.08691) does. Plain PyTorch, right on every device;
a kernel that returns the log-sum-exp can take the place of the two functions (:class:`TileFunctions`).

Shapes: G query heads per key head, q queries, k keys, D and E the sizes of keys and values. Results are in the dtype of
sums: float64 for float64, else float32.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NOTHING = -1e30
"""Log-sum-exp of a query that sees no key; finite, as the difference of two infinite ones would be NaN."""


class TileForward(Protocol):
    """From (key heads, G, q, D), (key heads, k, D), (key heads, k, E), (q, k) or ``None`` and the scale.

    Returns (key heads, G, q, E) outputs, 0 for a query that sees no key of the tile, and (key heads, G, q)
    log-sum-exps, :data:`NOTHING` for such a query.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class TileBackward(Protocol):
    """The part of a tile in the gradients of queries, keys and values.

    ``grad`` (key heads, G, q, E), and for each query over ALL its keys: ``logsumexp`` (key heads, G, q) and ``product``
    (key heads, G, q), the sum over E of gradient * output.
    """

    def __call__(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        logsumexp: Tensor,
        product: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class TileFunctions(NamedTuple):
    """How a tile is computed."""

    forward: TileForward
    backward: TileBackward


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over keys are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """:class:`TileForward` in PyTorch."""
    scores = _scores(query, key, mask, scale)
    top = scores.amax(-1, keepdim=True).clamp_min_(NOTHING)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _rows(weights) @ value.to(weights.dtype)
    out = out.view(*query.shape[:3], -1) / total.masked_fill(total == 0, 1)
    return out, (top + total.log().clamp_min(NOTHING)).squeeze(-1).clamp_min_(NOTHING)


def tile_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    product: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`TileBackward` in PyTorch."""
    weights = _scores(query, key, mask, scale).sub_(logsumexp[..., None]).exp_()
    rows, of_scores = _rows(grad.to(weights.dtype)), _rows(weights)
    to_value = of_scores.mT @ rows
    slopes = (rows @ value.to(weights.dtype).mT).view_as(weights)
    of_scores = _rows(slopes.sub_(product[..., None]).mul_(weights).mul_(scale))
    to_query = of_scores @ key.to(weights.dtype)
    to_key = of_scores.mT @ _rows(query.to(weights.dtype))
    return to_query.view_as(query), to_key, to_value


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(key heads, G, q, k), minus infinity where a key is not seen."""
    dtype = sum_dtype(query.dtype)
    scores = (_rows(query.to(dtype)) @ key.to(dtype).mT).view(*query.shape[:3], -1).mul_(scale)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf)


def _rows(tensor: Tensor) -> Tensor:
    """(key heads, G, q, ...) with queries of the G heads that share keys as rows of one matrix."""
    return tensor.flatten(1, 2)


def join_(out: Tensor, logsumexp: Tensor, of_tile: Tensor, tile_logsumexp: Tensor) -> None:
    """Add the result of a tile to the result over the keys before, in place."""
    joined = torch.logaddexp(logsumexp, tile_logsumexp)
    out.mul_((logsumexp - joined).exp_()[..., None]).add_(of_tile.mul_((tile_logsumexp - joined).exp_()[..., None]))
    logsumexp.copy_(joined)


PLAIN = TileFunctions(tile_forward, tile_backward)
