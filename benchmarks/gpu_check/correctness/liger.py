"""Liger's kernels: log-probs and gradients of a model that uses them, against float64 on the CPU without."""

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.check import Figure, Setting, SkippedError, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.correctness.attention import BOUNDS, exact, lengths, log_probs_and_gradient
from benchmarks.gpu_check.models import Rows, build, random_sequences, tiny_config


# A process of its own: rotary embeddings of the family are Liger's afterwards.
@check("liger/model", seconds=120, packages=["liger_kernel"], gpus=1, process="liger", simulated=False)
def with_ligers_kernels(setting: Setting) -> Iterator[Figure]:
    """Packed and padded rows, beside the same model with PyTorch's operators."""
    from rlhfkit.models.liger import use_liger_kernels

    if not setting.on_gpu:
        raise SkippedError("Liger's kernels need a GPU")
    sequences, config = random_sequences(lengths(setting)), tiny_config(hidden=256, heads=4)
    expected = {dtype: exact(config, sequences, dtype) for dtype in BOUNDS}
    models = {dtype: build(config, "cpu", torch.float32).to(dtype).to(setting.device) for dtype in BOUNDS}
    for kernels in ("PyTorch", "Liger"):
        for dtype, bounds in BOUNDS.items():
            if kernels == "Liger":
                use_liger_kernels(models[dtype])
            for packed in (True, False):
                found = log_probs_and_gradient(models[dtype], Rows(sequences, setting.device), packed)
                how = f"{kernels}, {'packed' if packed else 'padded'}, {str(dtype).removeprefix('torch.')}"
                parts = zip(("log-probs", "gradient"), found, expected[dtype], bounds, strict=True)
                for part, one, other, bound in parts:
                    yield Figure(f"{how}: {part}", distance(one, other), bound)
