"""Time and memory of one attention layer over many sequences, forward and backward; one JSON line.

    python benchmarks/attention.py                                # small shapes, for a CPU
    python benchmarks/attention.py --size large --device cuda     # bfloat16, seconds on a GPU

Cases: ``ragged`` sequences, the same with a sliding ``window``, and ``groups`` of samples that share their prompt.
Variants, each from queries, keys and values to their gradients:

- ``padded``: every sequence padded to the longest, PyTorch's own attention, as in a padded model. The yardstick.
- ``buckets``: :func:`rlhfkit.models.attention.varlen.bucket_attention`.
- ``varlen``, ``flash_attention_2``, ``flash_attention_3``: the kernels of :mod:`rlhfkit.models.attention.varlen` that
  can be used on the device; ``skipped`` says why others cannot.

``seconds`` is the fastest of the repeats, which run in turn, variant by variant; ``time_ratio`` is that over
``padded``'s, ``peak_mb`` (on CUDA) the allocated memory beyond inputs, gradients included. ``tokens`` counts those of
the packed row, ``padded_tokens`` those of the padded batch. From Python, ``measure(SIZES["large"], "groups", device,
dtype, repeats=10)`` returns the dictionary of one case.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout
from rlhfkit.models.attention.packed import packed_attention
from rlhfkit.models.attention.varlen import KERNELS, Case, attend, choose_kernel


@dataclass(frozen=True)
class Size:
    """Shapes: B sequences of at most ``longest`` tokens."""

    sequences: int
    longest: int
    heads: int
    key_heads: int
    head_size: int
    group: int
    """Samples of one prompt in ``groups``."""


SIZES = {"small": Size(16, 256, 4, 2, 64, 4), "large": Size(64, 2048, 28, 4, 128, 8)}  # large: a layer of Qwen2.5 7B
CASES = ("ragged", "window", "groups")


def lengths_of(size: Size, case: str) -> tuple[list[int], list[int]]:
    """Tokens of each sequence, log-uniform, and those that it shares with the one before."""
    uniform = torch.rand(size.sequences, generator=torch.Generator().manual_seed(0))
    lengths = (size.longest / 16 * 16**uniform).int().tolist()
    if case != "groups":
        return lengths, [0] * size.sequences
    prompt = size.longest // 4
    shared = [0 if row % size.group == 0 else prompt for row in range(size.sequences)]
    return [min(length + prompt, size.longest) for length in lengths], shared


def measure(size: Size, case: str, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Seconds, ratios and peak memory of one case."""
    lengths, shared = lengths_of(size, case)
    window = size.longest // 8 if case == "window" else None
    layout = PackedLayout.from_lengths(lengths, device, shared)
    shapes = [(count, size.head_size) for count in (size.heads, size.key_heads, size.key_heads)]
    row = [torch.randn(1, heads, layout.tokens.numel(), wide, device=device, dtype=dtype) for heads, wide in shapes]
    full = [torch.randn(len(lengths), h, max(lengths), wide, device=device, dtype=dtype) for h, wide in shapes]
    skipped: dict[str, str] = {}
    known = Case.of(row[0][0], row[1][0], row[2][0], 0.0)

    def padded() -> Tensor:
        query, key, value = _leaves(full)
        return attend(query, key, value, None, AttentionOptions(window=window))

    variants: dict[str, Callable[[], Tensor]] = {"padded": padded}
    for name in ["buckets", *KERNELS]:
        try:
            choose_kernel(known, name)
        except RuntimeError as error:
            skipped[name] = str(error)
            continue

        def packed(kernel: str = name) -> Tensor:
            options: Any = {"sliding_window": window, "packed_layout": layout, "kernel": kernel}
            return packed_attention(torch.nn.Identity(), *_leaves(row), None, **options)[0]

        variants[name] = packed
    results: dict[str, dict[str, float]] = {name: {"seconds": float("inf")} for name in variants}
    for repeat in range(repeats + 1):  # the first warms up, and sends indices
        for name, variant in variants.items():
            seconds, peak = _timed(variant, device)
            results[name]["seconds"] = min(results[name]["seconds"], seconds) if repeat else float("inf")
            if peak is not None:
                results[name]["peak_mb"] = peak
    for result in results.values():
        result["time_ratio"] = result["seconds"] / results["padded"]["seconds"]
    counts = {"tokens": layout.tokens.numel(), "padded_tokens": len(lengths) * max(lengths)}
    return counts | {"variants": results, "skipped": skipped}


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def _timed(variant: Callable[[], Tensor], device: torch.device) -> tuple[float, float | None]:
    """Seconds and peak megabytes of a forward and a backward pass."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
    out = variant()
    out.backward(torch.ones_like(out))
    if not cuda:
        return time.perf_counter() - start, None
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="torch's own choice by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on CUDA, else float32")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    torch.manual_seed(0)
    size = SIZES[arguments.size]
    cases = {case: measure(size, case, device, getattr(torch, dtype), arguments.repeats) for case in arguments.cases}
    setting = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": str(device), "dtype": dtype}
    print(json.dumps({**setting, "size": asdict(size), "cases": cases}))


if __name__ == "__main__":
    main()
