"""Packed attention by kernel, and which of PyTorch's attention kernels take which inputs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.compare import peak_gib, seconds_of


def ragged(total: int) -> list[int]:
    """Lengths between 16 and a quarter of ``total`` that add up to it, most of them short."""
    lengths: list[int] = []
    generator = torch.Generator().manual_seed(0)
    while sum(lengths) < total:
        length = int(16 + (total / 4) * float(torch.rand((), generator=generator)) ** 3)
        lengths.append(min(length, total - sum(lengths)))
    return lengths


@check("measure/packed_attention", seconds=60)
def packed_attention_by_kernel(setting: Setting) -> Iterator[Figure]:
    """One layer, forward and backward, bfloat16, 28 query and 4 key heads of 128: each kernel that can be used."""
    from rlhfkit.models.attention.layout import PackedLayout
    from rlhfkit.models.attention.packed import PACKED_ATTENTIONS, packed_attention

    heads, key_heads, size = setting.size((28, 4, 128), (4, 2, 16))
    lengths = ragged(setting.size(16384, 200))
    shapes = [(1, count, sum(lengths), size) for count in (heads, key_heads, key_heads)]
    made = [torch.randn(shape).to(setting.device, torch.bfloat16).requires_grad_() for shape in shapes]
    layer = torch.nn.Identity()
    for window in (None, setting.size(1024, 16)):
        for kernel in PACKED_ATTENTIONS:

            def step(kernel: str = kernel, window: int | None = window) -> None:
                layout = PackedLayout.from_lengths(lengths, torch.device(setting.device))
                out, _ = packed_attention(
                    layer, made[0], made[1], made[2], None, sliding_window=window, packed_layout=layout, kernel=kernel
                )
                torch.autograd.grad(out.float().sum(), made)

            case = f"{kernel}, {'no window' if window is None else f'window {window}'}"
            try:
                yield Figure(f"{case}: {len(lengths)} sequences", seconds_of(step, setting) * 1e3, unit="ms")
                peak = peak_gib(step, setting)
            except RuntimeError as error:
                yield Figure(case, " ".join(str(error).split())[:160])
                continue
            if peak is not None:
                yield Figure(f"{case}: peak memory", peak, unit="GiB")


@check("measure/sdpa_backends", seconds=60)
def sdpa_backends(setting: Setting) -> Iterator[Figure]:
    """Which backends take which inputs, forward and backward; ``math`` alone means memory for all scores."""
    length = setting.size(1024, 32)
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(-15).to(setting.device)
    cases: dict[str, tuple[torch.dtype, int, Tensor | None]] = {
        "bfloat16, causal": (torch.bfloat16, 8, None),
        "bfloat16, causal, 2 key heads": (torch.bfloat16, 2, None),
        "bfloat16, mask": (torch.bfloat16, 8, band),
        "bfloat16, mask, 2 key heads": (torch.bfloat16, 2, band),
        "float32, causal": (torch.float32, 8, None),
        "float32, causal, 2 key heads": (torch.float32, 2, None),
        "float32, mask, 2 key heads": (torch.float32, 2, band),
    }
    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    for case, (dtype, key_heads, mask) in cases.items():
        query = torch.randn(2, 8, length, 64).to(setting.device, dtype).requires_grad_()
        key = torch.randn(2, key_heads, length, 64).to(setting.device, dtype).requires_grad_()
        run = partial(_attend, query, key, mask)
        taking = [name.lower() for name in names if _takes(getattr(SDPBackend, name), run)]
        yield Figure(case, ", ".join(taking))
        yield Figure(f"{case}: as chosen by PyTorch", seconds_of(run, setting) * 1e3, unit="ms")


def _attend(query: Tensor, key: Tensor, mask: Tensor | None) -> None:
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    torch.autograd.grad(out.float().sum(), (query, key))


def _takes(backend: Any, run: Any) -> bool:
    import warnings

    try:
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")
            run()
    except RuntimeError:
        return False
    return True
