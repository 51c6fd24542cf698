"""Attention for packed batches: many sequences in one row, each seeing only itself, on every device.

The padding of a batch is removed before the model and never computed, so every linear layer sees real tokens only. For
attention alone the sequences are set apart again: grouped into buckets by the next power of two of their length, padded
within a bucket (less than twofold) and given to PyTorch's fused causal attention. No (N, N) mask exists, there are at
most log2(T) kernel calls, and a sequence cannot see another because it is never in the same matrix.

Registered with Transformers under :data:`PACKED_ATTENTION`, for any model that routes through its attention interface.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

PACKED_ATTENTION = "rlhfkit_packed"


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length: where their tokens lie in the packed row, and where they go back to."""

    gather: Tensor
    """(S, L) int64, index into the packed row for each of S sequences padded to L; padding points at token 0."""
    real: Tensor
    """(S * L,) int64, positions of ``gather.flatten()`` that are real tokens."""
    longest: int
    """L, tokens."""


@dataclass(frozen=True)
class PackedLayout:
    """How a packed row of N tokens divides into sequences. Built once a forward, used in every layer."""

    buckets: tuple[Bucket, ...]
    order: Tensor
    """(N,) int64, undoes the order in which buckets return their tokens."""
    position_ids: Tensor
    """(1, N) int64, from 0 in every sequence."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> "PackedLayout":
        """Plan the buckets.

        Args:
            lengths: Tokens of each sequence, in the order in which they are packed; at least 1 each.
            device: Where the index tensors are put.
        """
        starts, total = [], 0
        members: dict[int, list[int]] = defaultdict(list)
        for row, length in enumerate(lengths):
            starts.append(total)
            total += length
            members[(length - 1).bit_length()].append(row)
        buckets, returned = [], []
        for key in sorted(members):
            size = torch.tensor([lengths[row] for row in members[key]])
            start = torch.tensor([starts[row] for row in members[key]])
            steps = torch.arange(int(size.max()))
            inside = steps < size[:, None]
            gather = torch.where(inside, start[:, None] + steps, 0)
            returned.append(gather[inside])
            buckets.append(Bucket(gather.to(device), inside.flatten().nonzero()[:, 0].to(device), len(steps)))
        order = torch.empty(total, dtype=torch.int64)
        order[torch.cat(returned)] = torch.arange(total)
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(tuple(buckets), order.to(device), positions[None].to(device))


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(L, L) causal band for sliding-window attention; ``None`` when plain causal attention says the same."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


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
    packed_layout: PackedLayout | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: causal self-attention over packed or right-padded rows, without a mask.

    Args:
        module: The attention layer.
        query: (1, heads, N, D) packed, or (B, heads, T, D) padded on the right.
        key: Same with key heads.
        value: Same with key heads.
        attention_mask: Never used: causal attention of right-padded rows needs none.
        scaling: Factor of the scores; 1/sqrt(D) when ``None``.
        dropout: Probability.
        sliding_window: Tokens a position can look back, itself included; all when ``None``.
        packed_layout: Where sequences begin and end; ``None``: the batch is padded.
        **unused: Whatever else Transformers hands to every attention.

    Returns:
        (1, N, heads, D) or (B, T, heads, D), and no weights.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = _window_mask(query.shape[2], sliding_window, query.device)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    if packed_layout is None:
        return attend(query, key, value).transpose(1, 2).contiguous(), None
    pieces = []
    for bucket in packed_layout.buckets:
        apart = [x[0][:, bucket.gather].transpose(0, 1) for x in (query, key, value)]  # (S, heads, L, D)
        together = attend(*apart).transpose(1, 2).flatten(0, 1)  # (S * L, heads, D)
        pieces.append(together[bucket.real])
    return torch.cat(pieces)[packed_layout.order][None], None


def register_packed_attention() -> None:
    """Make :data:`PACKED_ATTENTION` known to Transformers; idempotent."""
    from transformers import AttentionInterface

    # No mask function is registered on purpose: Transformers then builds no mask at all.
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def supports_packing(config: Any) -> bool:
    """Whether a model's attention is plain enough for :func:`packed_attention`.

    Args:
        config: A Transformers model configuration.

    Returns:
        False for attention with soft-capped scores, learned sinks or recurrent layers; those keep Transformers' own.
    """
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    return (
        getattr(text, "attn_logit_softcapping", None) is None
        and text.model_type != "gpt_oss"
        and layer_types <= {"full_attention", "sliding_attention"}
    )
