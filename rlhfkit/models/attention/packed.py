"""Attention for packed batches: many sequences in one row, each seeing only itself, on every device.

Linear layers compute real tokens only. For attention the sequences are grouped by the next power of two of their
length, padded within a group (less than twofold) and given to PyTorch's fused causal attention: no (N, N) mask and at
most log2(T) kernel calls. Registered with Transformers under :data:`PACKED_ATTENTION`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

PACKED_ATTENTION = "rlhfkit_packed"


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length: indices of their tokens in the packed row."""

    gather: Tensor
    """(S, L) int64, index into the packed row for each of S sequences padded to L; padding points at token 0."""
    real: Tensor
    """Positions of ``gather.flatten()`` whose results are kept: neither padding nor a prefix of another row."""
    longest: int
    """L, tokens."""


@dataclass(frozen=True)
class PackedLayout:
    """The division of a packed row of N tokens into sequences, built once per forward pass.

    A prefix that neighbours share (the prompt of a preference pair or group) is in the row once; attention reads its
    keys and values for every sequence that has it.
    """

    buckets: tuple[Bucket, ...]
    order: Tensor
    """(N,) int64, undoes the order of the tokens in the concatenated results of the buckets."""
    position_ids: Tensor
    """(1, N) int64, from 0 in every sequence."""
    places: Tensor
    """(B, T) int64, index of each token of each sequence in the packed row; 0 for padding."""
    readers: set[int] = field(default_factory=set, compare=False)
    """The ``id`` of each attention layer that has used the layout; empty after a forward pass if none did."""

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], device: torch.device, shared: Sequence[int] | None = None
    ) -> "PackedLayout":
        """Plan the buckets of sequences of ``lengths`` (each at least 1), packed in this order.

        ``shared``: leading tokens that each sequence shares with the one before it; 0 when ``None``.
        """
        sizes = torch.tensor(lengths)
        kept_from = torch.zeros_like(sizes) if shared is None else torch.tensor(shared)
        steps = torch.arange(int(sizes.max()))
        inside = steps < sizes[:, None]
        own = inside & (steps >= kept_from[:, None])
        places = torch.zeros(inside.shape, dtype=torch.int64)
        places[own] = torch.arange(int(own.sum()))
        for row in kept_from.nonzero()[:, 0].tolist():
            places[row, : kept_from[row]] = places[row - 1, : kept_from[row]]
        members: dict[int, list[int]] = defaultdict(list)
        for row, (length, prefix) in enumerate(zip(lengths, kept_from.tolist(), strict=True)):
            if prefix < length:  # else another row contains the whole sequence
                members[(length - 1).bit_length()].append(row)
        buckets, returned = [], []
        for key in sorted(members):
            longest = int(sizes[members[key]].max())
            gather, kept = places[members[key], :longest], own[members[key], :longest]
            returned.append(gather[kept])
            buckets.append(Bucket(gather.to(device), kept.flatten().nonzero()[:, 0].to(device), longest))
        packed = torch.cat(returned)
        order = torch.empty_like(packed)
        order[packed] = torch.arange(len(packed))
        positions = steps.expand_as(own)[own]
        return cls(tuple(buckets), order.to(device), positions[None].to(device), places.to(device))

    @classmethod
    def from_batch(cls, input_ids: Tensor, real: Tensor) -> tuple["PackedLayout", Tensor]:
        """Plan a batch (B, T) with ``real`` tokens on the left; also returns the (1, N) tokens of the packed row."""
        same = (input_ids[1:] == input_ids[:-1]) & real[1:] & real[:-1]
        shared = torch.nn.functional.pad(same.cumprod(-1).sum(-1), (1, 0))
        lengths, prefixes = torch.stack([real.sum(-1), shared]).tolist()
        own = real & (torch.arange(real.shape[1], device=real.device) >= shared[:, None])
        return cls.from_lengths(lengths, real.device, prefixes), input_ids[own][None]


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(queries, keys) causal band whose last row sees the last key; ``None`` if all entries are true."""
    if queries == 1 and (window is None or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (window or keys))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """PyTorch's fused attention of (B, heads, queries, D) to (B, key heads, keys, D), causal when there is no mask."""
    queries, keys = query.shape[2], key.shape[2]
    plain = mask is None and causal and queries == keys and (window is None or keys <= window)
    if mask is None and causal and not plain:
        mask = _causal_mask(queries, keys, window, query.device)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=plain,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    packed_layout: PackedLayout | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: causal attention, over packed rows when there is a layout.

    ``query`` is (1, heads, N, D) packed, or (B, heads, T, D); ``key`` and ``value`` have key heads, and are longer when
    there is a cache. ``attention_mask`` comes only from a caller (generation with padding). ``scaling`` is 1/sqrt(D)
    when ``None``; ``sliding_window`` includes the position itself; ``is_causal`` is the layer's attribute when
    ``None``, as in Transformers: false for layers of a vision tower. Models that depend on ``unused`` arguments (soft
    caps, sinks) are found when they are loaded.

    Returns:
        (1, N, heads, D) or (B, T, heads, D), and no weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if packed_layout is None:
        out = _attend(query, key, value, attention_mask, scaling, dropout, sliding_window, causal)
        return out.transpose(1, 2).contiguous(), None
    packed_layout.readers.add(id(module))
    pieces = []
    for bucket in packed_layout.buckets:
        q, k, v = (x[0][:, bucket.gather].transpose(0, 1) for x in (query, key, value))  # (S, heads, L, D)
        attended = _attend(q, k, v, None, scaling, dropout, sliding_window, True).transpose(1, 2)
        pieces.append(attended.flatten(0, 1)[bucket.real])  # (tokens, heads, D)
    return torch.cat(pieces)[packed_layout.order][None], None


def _mask_if_given(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Transformers' mask interface: no mask, unless the caller gave a padding mask."""
    if attention_mask is None:
        return None
    from transformers.masking_utils import sdpa_mask

    return cast("Tensor | None", sdpa_mask(*args, attention_mask=attention_mask, **kwargs))


def register_packed_attention() -> None:
    """Register :data:`PACKED_ATTENTION` with Transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _mask_if_given)
