"""``ProbeBounds``: how far apart log-probs of the same tokens may be when two programs compute the same model.

Where the numbers come from. In float32 only the order of summation differs: vLLM and Transformers differed by 5e-6 at
most on CPUs (models up to 0.5B parameters), so 1e-3 is generous, and any token above it is a fault.

In 16 bits the largest difference says little: bfloat16 has 8 bits, so a logit between 16 and 32 has steps of 0.125, and
a rare token may be off by several. Hence the mean over tokens that were sampled. vLLM's from Transformers' was, in
bfloat16 on a CPU, 0.001 at 0.3M parameters, 0.004 at 58M, 0.011 at 204M and 0.019 at 0.5B; larger models and the
kernels of GPUs have not been measured. float16 has 3 bits more, and TF32, which GPUs may compute float32 in, as many.
FP8 rounds weights and activations to 3 bits: means of 0.04 to 0.15 in models of two layers on a CPU.
Weights of another model differ by several nats, a single layer that kept old weights by 0.1 and more.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor


class ProbeBounds(NamedTuple):
    """Bounds on the differences of log-probs."""

    statistic: Literal["max", "mean"]
    """Of the absolute differences."""
    warn: float
    """Above it a warning is logged: unusual."""
    fail: float
    """Above it the weights, or the models, are not the same."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, tolerance: float | None = None, *, tf32: bool = False, quantized: bool = False
    ) -> "ProbeBounds":
        """Return the bounds for a type.

        Args:
            dtype: Type in which the models compute.
            tolerance: Replaces ``fail``; there is no warning then. ``None``: the module's docstring explains them.
            tf32: Whether float32 is computed as TF32.
            quantized: Whether one of the two computes in 8 bits.
        """
        bounds = _BOUNDS.get(torch.float16 if tf32 and dtype == torch.float32 else dtype, _BOUNDS[torch.bfloat16])
        bounds = _QUANTIZED if quantized else bounds
        return bounds if tolerance is None else cls(bounds.statistic, tolerance, tolerance)

    def measure(self, differences: Tensor) -> float:
        """Return the statistic of (T,) differences, NaN if one is; 0 if there are none."""
        sizes = differences.double().abs()
        if not len(sizes):
            return 0.0
        return float(sizes.max() if self.statistic == "max" else sizes.mean())


_BOUNDS = {
    torch.float64: ProbeBounds("max", 1e-6, 1e-6),
    torch.float32: ProbeBounds("max", 1e-3, 1e-3),
    torch.float16: ProbeBounds("mean", 0.02, 0.1),
    torch.bfloat16: ProbeBounds("mean", 0.1, 0.3),
}
_QUANTIZED = ProbeBounds("mean", 0.3, 1.0)
