"""Attention by PyTorch's ``scaled_dot_product_attention``, on every device and in every dtype.

Sequences of a packed row are grouped by the next power of two of their length and padded within a group (less than
twofold): no (N, N) mask and at most log2(T) kernel calls. Rows that are not packed take :func:`attend` as they are.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhfkit.models.attention.layout import PackedLayout


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(queries, keys) causal band whose last row sees the last key; ``None`` if all entries are true."""
    if queries == 1 and (window is None or keys <= window):
        return None
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (window or keys))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    window: int | None,
    causal: bool = True,
) -> Tensor:
    """Attention of (B, heads, queries, D) to (B, key heads, keys, D), causal when there is no mask.

    Where PyTorch's fused kernels would refuse fewer key heads than query heads, keys and values are repeated: torch
    2.13 would compute a (queries, keys) matrix for every head.
    """
    queries, keys = query.shape[2], key.shape[2]
    plain = mask is None and causal and queries == keys and (window is None or keys <= window)
    if mask is None and causal and not plain:
        mask = causal_mask(queries, keys, window, query.device)
    grouped = query.shape[1] != key.shape[1]
    if grouped and not _takes_groups(query, value, mask):
        key, value = (_repeated(heads, query.shape[1]) for heads in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=plain, scale=scaling, enable_gqa=grouped
    )


def _takes_groups(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch has a fused kernel for fewer key heads: on CUDA only flash attention is one, on CPUs all are."""
    if query.device.type == "cpu":
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    if mask is not None or not half or not query.shape[-1] == value.shape[-1] <= 256:
        return False
    return query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _repeated(heads: Tensor, count: int) -> Tensor:
    """(B, key heads, T, D) as (B, count, T, D), each head repeated for the query heads that read it."""
    batch, fewer, length, size = heads.shape
    copies = heads[:, :, None].expand(batch, fewer, count // fewer, length, size)
    return copies.reshape(batch, count, length, size)


def bucket_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Causal attention within each sequence of a packed row: (N, heads, D) from (heads, N, D)."""
    pieces = []
    for bucket in layout.buckets:
        q, k, v = (x[:, bucket.gather].transpose(0, 1) for x in (query, key, value))  # (S, heads, L, D)
        attended = attend(q, k, v, None, scaling, dropout, window).transpose(1, 2)
        pieces.append(attended.flatten(0, 1)[bucket.real])  # (tokens, heads, D)
    return torch.cat(pieces)[layout.order]
