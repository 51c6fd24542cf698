"""What varlen kernels compute, in plain PyTorch: the published semantics of flash-attn's varlen functions from 2.1.

``cu_seqlens_q`` and ``cu_seqlens_k`` cut queries and keys into sequences; query i of a sequence with n queries and m
keys stands at key i + m - n ("bottom-right") and sees the keys from ``window[0]`` before it to ``window[1]`` after it,
all for -1. Query head h reads key head h // (heads / key heads).
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfkit.models.attention import varlen


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """(N, heads, D) from (N, heads, D) and (K, key heads, D); refuses what the kernels refuse."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) == (0, len(query), 0, len(key))
    counts_q, counts_k = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (max(counts_q), max(counts_k)) == (longest_q, longest_k)
    assert min(counts_q) > 0
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scale = query.shape[2] ** -0.5 if scale is None else scale
    pieces = []
    for first_q, n, first_k, m in zip(ends_q, counts_q, ends_k, counts_k, strict=False):
        q, k, v = query[first_q : first_q + n], key[first_k : first_k + m], value[first_k : first_k + m]
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        ahead = torch.arange(m, device=q.device) - (torch.arange(n, device=q.device)[:, None] + m - n)
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= ahead < -window[0]
        if window[1] >= 0:
            hidden |= ahead > window[1]
        pieces.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(pieces)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.13, without arguments for inference."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert isinstance(window_size, tuple)  # torch compares it with (-1, 0)
    return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> Tensor:
    """``flash_attn.flash_attn_varlen_func`` of flash-attn 2.8, without arguments that nobody gives it."""
    window = (window_size[0], 0) if causal else window_size
    out = reference(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window)
    return torch.nn.functional.dropout(out, dropout_p)  # not where the kernel drops, but as visibly


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, None]:
    """``flash_attn_interface.flash_attn_varlen_func`` of flash-attn 3 before it left the log-sum-exps out.

    It has the same arguments, but for the dropout.
    """
    return flash_attn_2(q, k, v, **how), None


def plug_in(patch: pytest.MonkeyPatch, *names: str, wrap: Any = lambda function: function) -> None:
    """Give the CPU the kernels ``names`` of :data:`varlen.KERNELS`, in any dtype; the others are not installed."""
    missing: Any = None  # an import of it raises ImportError
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ModuleNotFoundError:  # torch before 2.10
        module = ModuleType("torch.nn.attention.varlen")
    packages = {
        "flash_attention_2": ("flash_attn", flash_attn_2),
        "flash_attention_3": ("flash_attn_interface", flash_attn_3),
    }
    for name, (package, function) in packages.items():
        fake = ModuleType(package)
        fake.flash_attn_varlen_func = wrap(function)  # type: ignore[attr-defined]
        patch.setitem(sys.modules, package, fake if name in names else missing)
    if "varlen" in names:
        patch.setattr(module, "varlen_attn", wrap(varlen_attn), raising=False)
        patch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    else:
        patch.setitem(sys.modules, "torch.nn.attention.varlen", missing)
    patch.setattr(varlen, "DEVICES", ("cuda", "cpu"))
    patch.setattr(varlen, "HALF", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
    patch.setattr(varlen, "TOLERANCE", dict.fromkeys((torch.float32, torch.float64), 1e-4) | varlen.TOLERANCE)
    varlen.choose_kernel.cache_clear()
